// The chat: a conversation in memory, and the settings of its next answer.

import { Answer } from "./answer.js";
import { get, stream } from "./api.js";
import { byId, el, shown } from "./dom.js";
import { Tints } from "./tokens.js";

const ALL = " all";
const OFF = " off";

let models = [];
let messages = [];
let running;

function model() {
  return models.find((each) => each.id === byId("model").value) ?? models[0];
}

function offer(select, options) {
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
}

function offerDrafters() {
  const drafters = model().drafters;
  offer(byId("drafter"), [
    ["auto", "auto"],
    ...(drafters.length > 1 ? [[ALL, "all of them"]] : []),
    ...drafters.map((name) => [name, name]),
    [OFF, "none: plain decoding"],
  ]);
  const tints = new Tints(drafters);
  const entries = [
    ...drafters.map((name) => [tints.of([name]), `drafted by ${name}`]),
    ...(drafters.length > 1 ? [["several", "by several"]] : []),
    ["bonus", "bonus: the target's own, behind a draft"],
    ["plain", "plain: nothing was drafted"],
  ];
  byId("legend").replaceChildren(
    ...entries.map(([kind, text]) => el("li", {}, el("span", { class: `token ${kind}` }, text))),
  );
  const { id, dtype, max_model_len: length } = model();
  byId("served").textContent = `${id}, ${dtype}, ${length} tokens`;
}

async function begin() {
  try {
    models = (await get("v1/models")).data;
  } catch (error) {
    say(error.message);
    return;
  }
  if (!models.length) {
    say("No target worker has introduced itself yet. Trying again…");
    setTimeout(begin, 2000);
    return;
  }
  say("");
  offer(byId("model"), models.map((each) => [each.id, each.id]));
  offerDrafters();
}

function say(text) {
  byId("state").textContent = text;
}

function number(id) {
  const value = byId(id).value;
  return value === "" ? undefined : Number(value);
}

function body(drafts, seed) {
  const drafter = byId("drafter").value;
  const speculation = drafts
    ? {
        drafter: drafter === ALL ? model().drafters : drafter,
        max_draft_tokens: number("max_draft_tokens"),
        tree: byId("tree").value === "true",
      }
    : { enabled: false };
  return {
    model: model().id,
    messages,
    stream: true,
    max_tokens: number("max_tokens"),
    temperature: number("temperature"),
    seed,
    speculation: { ...speculation, rounds: true },
  };
}

async function answered(answer, drafts, seed) {
  answer.begin();
  try {
    for await (const chunk of stream("v1/chat/completions", body(drafts, seed), running.signal)) {
      keepEnd(() => chunk.choices.forEach((choice) => answer.add(choice)));
    }
  } catch (error) {
    answer.fail(error.name === "AbortError" ? "Stopped." : error.message);
    throw error;
  }
}

/** Keep the end in view while the page grows, unless the reader has gone elsewhere. */
function keepEnd(grow) {
  const page = document.scrollingElement;
  const near = page.scrollHeight - page.scrollTop - page.clientHeight < 100;
  grow();
  if (near) page.scrollTop = page.scrollHeight;
}

async function send() {
  const text = byId("message").value.trim();
  if (!text || running || !models.length) return;
  const tints = new Tints(model().drafters);
  const off = byId("drafter").value === OFF;
  const compares = byId("compare").checked && !off;
  // One seed for both: the texts are equal then, whatever the temperature.
  const seed = number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const plain = compares || off ? new Answer("Plain", false, tints) : undefined;
  const drafted = off ? undefined : new Answer("Drafted", true, tints);
  const views = [drafted, plain].filter((view) => view !== undefined);
  const answers = el(
    "div",
    { class: compares ? "answers two" : "answers" },
    ...views.map((view) => view.element),
  );
  const turn = el("article", { class: "turn" }, el("p", { class: "said" }, text), answers);
  byId("hint").hidden = true;
  byId("conversation").append(turn);
  byId("message").value = "";
  messages.push({ role: "user", content: text });
  running = new AbortController();
  busy(true);
  say(`Answering (seed ${seed}).`);
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
  try {
    // One after the other, so that neither slows the other down.
    if (plain) await answered(plain, false, seed);
    if (drafted) await answered(drafted, true, seed);
    const kept = drafted ?? plain;
    messages.push({ role: "assistant", content: kept.text });
    if (compares) {
      keepEnd(() => answers.after(el("p", { class: "verdict" }, verdict(drafted, plain))));
    }
    say(`Done: ${kept.numbers.tokens} tokens, ${shown(kept.numbers.rate, 1)} a second (seed ${seed}).`);
  } catch (error) {
    // What the conversation goes on with must have been answered.
    messages.pop();
    if (!byId("message").value) byId("message").value = text;
    say(error.name === "AbortError" ? "Stopped." : "That went wrong.");
  } finally {
    running = undefined;
    busy(false);
  }
}

function verdict(drafted, plain) {
  const times = (one) => `${one.numbers.tokens} tokens in ${shown(one.numbers.seconds, 2)} s`;
  const faster = shown(drafted.numbers.rate / plain.numbers.rate, 2);
  const timed =
    `Drafted ${times(drafted)}, plain ${times(plain)}: ` +
    `${faster} times as many tokens a second after the first.`;
  if (drafted.text === plain.text && drafted.finish === plain.finish) {
    return `The texts are equal. ${timed}`;
  }
  let at = 0;
  while (at < drafted.text.length && drafted.text[at] === plain.text[at]) at += 1;
  const near = (text) => `“${text.slice(Math.max(0, at - 12), at + 12)}”`;
  return `The texts differ from character ${at + 1} on: ${near(drafted.text)}, but plain ${near(plain.text)}. ${timed}`;
}

function busy(now) {
  byId("send").hidden = now;
  byId("stop").hidden = !now;
  byId("clear").disabled = now;
  byId("conversation").setAttribute("aria-busy", String(now));
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("message").focus();
});
byId("clear").addEventListener("click", () => {
  messages = [];
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  byId("hint").hidden = false;
  say("Cleared.");
  byId("message").focus();
});
byId("model").addEventListener("change", offerDrafters);
byId("message").focus();
begin();
