// What the server says. A key, where it wants one, is kept for this tab only.

import { el } from "./dom.js";

const KEY = "slipstream-key";

/** What the server refuses, in its own words. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  let message = `${response.status} ${response.statusText}: ${text.slice(0, 500)}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Whoever stands before the server does not speak its language.
  }
  throw new Refusal(response.status, message);
}

/** Ask for a key, and keep it; false if none is given. */
function askForKey(why) {
  const input = el("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const cancel = el("button", { type: "button", class: "quiet" }, "Cancel");
  const form = el(
    "form",
    { method: "dialog" },
    el("label", { for: "key" }, "API key"),
    input,
    el("p", { class: "error" }, why),
    el("p", { class: "note" }, "It is kept until this tab is closed."),
    el("div", { class: "buttons" }, el("button", { type: "submit" }, "Use it"), cancel),
  );
  const dialog = el("dialog", { "aria-label": "API key" }, form);
  document.body.append(dialog);
  cancel.addEventListener("click", () => dialog.close());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    dialog.close("given");
  });
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "given");
    });
  });
}

/** The answer to what `asking` asks; keys are asked for as long as the server wants another. */
async function withKey(asking) {
  for (;;) {
    try {
      return await asking();
    } catch (error) {
      if (error.status !== 401 || !(await askForKey(error.message))) throw error;
    }
  }
}

/** What is at a path. */
export async function get(path) {
  return (await withKey(() => ask(path))).json();
}

/** The chunks of a streamed answer. */
export async function* stream(path, body, signal) {
  const options = {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  const response = await withKey(() => ask(path, options));
  let left = "";
  for await (const text of texts(response.body)) {
    const events = (left + text).split("\n\n");
    left = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(500, chunk.error.message);
      yield chunk;
    }
  }
  throw new Refusal(500, "the stream ended before the answer did");
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
