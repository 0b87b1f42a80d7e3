// One answer as it grows: tinted tokens, numbers, and the round that is looked at.

import { el, shown } from "./dom.js";
import { Numbers } from "./numbers.js";
import { Spelling, label, path, withOrigins } from "./tokens.js";
import { drawTree } from "./tree.js";

// Milliseconds: on a machine that serves as well, every drawing takes time from the answer.
const PAUSE = 100;

/** `element` is its place on the page; `drafts` tells whether anything may be drafted for it. */
export class Answer {
  text = "";
  finish = "";
  numbers;
  #rounds = [];
  #spans = [];
  #spelling = new Spelling();
  #follows = true;
  #chosen = -1;
  #due;
  #drafts;
  #tints;
  #words;
  #counted;
  #figure = el("figure", { class: "round", hidden: true });

  constructor(title, drafts, tints) {
    this.#drafts = drafts;
    this.#tints = tints;
    this.#words = el("div", {
      class: "words",
      tabindex: "0",
      role: "group",
      "aria-label": `${title}. Arrow keys choose a round.`,
    });
    this.#counted = el("p", { class: "note" }, "Waiting for its turn.");
    this.element = el(
      "section",
      { class: "answer", "aria-label": title },
      el("h3", {}, title),
      this.#words,
      this.#counted,
      this.#figure,
    );
    this.#words.addEventListener("click", (event) => {
      const round = event.target.closest("[data-round]")?.dataset.round;
      if (round !== undefined) this.#choose(Number(round));
    });
    this.#words.addEventListener("keydown", (event) => this.#walk(event));
  }

  /** It is asked for now. */
  begin() {
    this.numbers = new Numbers();
    this.#count();
  }

  /** Take a chunk's choice. */
  add(choice) {
    const text = choice.delta.content ?? "";
    this.text += text;
    this.finish = choice.finish_reason ?? this.finish;
    const tokens = [];
    for (const round of choice.rounds ?? []) {
      const number = this.#rounds.push(round) - 1;
      this.#spans.push([]);
      this.numbers.add(round);
      tokens.push(...withOrigins(round).map((token) => ({ ...token, round: number })));
    }
    this.#show(this.#spelling.add(text, tokens));
    if (choice.finish_reason) this.#show(this.#spelling.end());
    if (choice.finish_reason) this.#refresh();
    else if (tokens.length) this.#due ??= setTimeout(() => this.#refresh(), PAUSE);
  }

  /** Show the numbers and the round of now. */
  #refresh() {
    clearTimeout(this.#due);
    this.#due = undefined;
    this.#count();
    if (this.#follows && this.#drafts && this.#rounds.length) this.#look(this.#rounds.length - 1);
  }

  /** Say what went wrong, in the server's words. */
  fail(message) {
    this.#refresh();
    this.#words.after(el("p", { class: "error", role: "alert" }, message));
  }

  #count() {
    const counted = this.numbers.list(this.#drafts);
    this.#counted.replaceWith(counted);
    this.#counted = counted;
  }

  #show(placed) {
    for (const [token, text] of placed) {
      const kind = token.origin === "drafted" ? this.#tints.of(token.drafters) : token.origin;
      const by = token.origin === "drafted" ? `${token.drafters.join(", ")} (${shown(token.score, 2)})` : kind;
      const span = el(
        "span",
        { class: `token ${kind}`, "data-round": token.round, title: `round ${token.round}: ${by}` },
        text,
      );
      this.#spans[token.round].push(span);
      this.#words.append(span);
    }
  }

  #walk(event) {
    const last = this.#rounds.length - 1;
    const to = {
      ArrowLeft: this.#chosen - 1,
      ArrowRight: this.#chosen + 1,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined || last < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#choose(Math.min(last, Math.max(0, to)));
  }

  /** Look at a round, and stay there. */
  #choose(number) {
    this.#follows = false;
    this.#look(number);
    for (const span of this.#words.querySelectorAll(".looked-at")) span.classList.remove("looked-at");
    for (const span of this.#spans[number]) span.classList.add("looked-at");
  }

  #look(number) {
    const round = this.#rounds[number];
    this.#chosen = number;
    const before = number ? label(this.#rounds[number - 1].tokens.at(-1).token) : "prompt";
    const step = (text, name, to) => {
      const button = el("button", { type: "button", class: "quiet", "aria-label": name }, text);
      button.disabled = to < 0 || to >= this.#rounds.length;
      button.addEventListener("click", () => {
        this.#choose(to);
        this.#figure.querySelector(`[aria-label="${name}"]`).focus();
      });
      return button;
    };
    this.#figure.replaceChildren(
      el(
        "figcaption",
        { "aria-live": this.#follows ? "off" : "polite" },
        step("←", "Previous round", number - 1),
        el("span", {}, told(round, number)),
        step("→", "Next round", number + 1),
      ),
      el(
        "div",
        { class: "drawing", tabindex: "0", role: "group", "aria-label": "The tree, as a drawing" },
        drawTree(round, before, this.#tints),
      ),
      el("p", { class: "note" }, facts(round)),
    );
    this.#figure.hidden = false;
  }
}

function quoted(tokens) {
  return tokens.map((token) => `“${label(token.token)}”`).join(" ");
}

function told(round, number) {
  if (number === 0) return `Prefill: ${quoted(round.tokens)}`;
  const accepted = path(round);
  const said = accepted.length ? ` (${quoted(accepted)})` : "";
  const own = round.tokens[round.accepted];
  const end = own ? `then the target's own ${quoted([own])}` : "which ends the answer";
  return `Round ${number}: ${round.nodes.length} drafted, ${accepted.length} accepted${said}, ${end}`;
}

function facts(round) {
  const parts = [
    `after ${round.base_len} tokens`,
    `price of a row ${shown(round.price, 3)}`,
    `waited ${shown(round.wait_ms, 1)} ms`,
    `step ${shown(round.step_ms, 1)} ms with ${round.step_rows} rows of all answers`,
    `proposals ${round.proposals}, hits ${round.hits}`,
  ];
  return parts.join(" · ");
}
