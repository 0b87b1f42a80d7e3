// What speculation does for one answer, round by round.

import { el, percent, shown } from "./dom.js";

export class Numbers {
  tokens = 0;
  #asked = performance.now();
  #first;
  #last;
  #rounds = 0;
  #drafted = 0;
  #committed = 0;
  #proposals = 0;
  #hits = 0;
  #tested = [];
  #accepted = [];
  #round;

  /** Take a round; the first one of an answer is the prefill's. */
  add(round) {
    this.#last = performance.now();
    this.tokens += round.tokens.length;
    this.#proposals += round.proposals;
    this.#hits += round.hits;
    this.#round = round;
    if (this.#first === undefined) {
      this.#first = this.#last;
      return;
    }
    this.#rounds += 1;
    this.#drafted += round.nodes.length;
    this.#committed += round.tokens.length;
    for (let depth = 0; depth < round.tested; depth += 1) {
      this.#tested[depth] = (this.#tested[depth] ?? 0) + 1;
      this.#accepted[depth] = (this.#accepted[depth] ?? 0) + (depth < round.accepted);
    }
  }

  /** Tokens a second after the first. */
  get rate() {
    return (this.tokens - 1) / ((this.#last - this.#first) / 1000);
  }

  /** Seconds from the question to the last token. */
  get seconds() {
    return (this.#last - this.#asked) / 1000;
  }

  /** The numbers as a list; those of drafting only where something is drafted. */
  list(drafts) {
    const rows = [
      ["tokens/s", shown(this.rate, 1), "after the first token"],
      ["first token", `${shown(this.#first - this.#asked)} ms`, "from the question to it"],
      ["tokens", String(this.tokens), "of the answer so far"],
    ];
    if (drafts) {
      rows.push(
        ["τ", shown(this.#committed / this.#rounds, 2), "tokens committed a round"],
        ["draft length", `${this.#round?.nodes.length ?? 0}`, "nodes in the last round"],
        ["mean length", shown(this.#drafted / this.#rounds, 1), "nodes a round"],
        ["price", shown(this.#round?.price, 3), "what a drafted row must be worth, in tokens"],
        ["hit rate", percent(this.#hits / this.#proposals), "proposals known before their commit"],
      );
    }
    const items = rows.map(([name, value, why]) =>
      el("div", { title: why }, el("dt", {}, name), el("dd", {}, value)),
    );
    if (drafts && this.#tested.length) items.push(this.#byDepth());
    return el("dl", { class: "numbers" }, ...items);
  }

  #byDepth() {
    const bars = this.#tested.map((tested, depth) => {
      const share = this.#accepted[depth] / tested;
      const bar = el("span", { class: "bar" });
      bar.style.setProperty("--share", share);
      const why = `${this.#accepted[depth]} of ${tested} accepted at depth ${depth + 1}`;
      return el("span", { class: "depth", title: why }, bar, `${depth + 1}: ${percent(share)}`);
    });
    return el(
      "div",
      { class: "wide" },
      el("dt", {}, "accepted by depth"),
      el("dd", { class: "depths" }, ...bars),
    );
  }
}
