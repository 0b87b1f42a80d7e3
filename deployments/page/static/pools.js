// The pools: what every worker says of itself, asked again and again.

import { get } from "./api.js";
import { byId, el, percent, shown } from "./dom.js";

const PAUSE_MS = 2000;
const SAMPLES = 6;

/** The last states of each worker, oldest first. */
const seen = new Map();

function remember(worker) {
  const states = seen.get(worker.worker_id) ?? [];
  if (worker.status) states.push({ at: performance.now(), ...worker.status });
  seen.set(worker.worker_id, states.slice(-SAMPLES));
}

/** What was counted lately, divided by another count, or by seconds. */
function rate(worker, count, by) {
  const states = seen.get(worker.worker_id);
  const [first, last] = [states[0], states.at(-1)];
  const over = by ? last[by] - first[by] : (last.at - first.at) / 1000;
  return over > 0 ? (last[count] - first[count]) / over : NaN;
}

function kv(status) {
  const used = status.kv_slots - status.kv_free_slots;
  const bar = el("span", { class: "bar" });
  bar.style.setProperty("--share", used / status.kv_slots);
  return el("span", { class: "depth" }, bar, `${percent(used / status.kv_slots)} of ${status.kv_slots} tokens`);
}

const COLUMNS = {
  target: [
    ["answers", (w) => `${w.status.running_sessions} of ${w.max_sessions} run, ${w.status.waiting_sessions} wait`],
    ["price of a row", (w) => `${shown(w.status.price, 3)} tokens`],
    ["rows a step", (w) => shown(rate(w, "rows", "steps"), 1)],
    ["tokens/s", (w) => shown(rate(w, "tokens_committed"), 1)],
    ["accepted", (w) => percent(rate(w, "tokens_accepted", "tokens_drafted"))],
    ["KV cache", (w) => kv(w.status)],
    ["preemptions", (w) => String(w.status.preemptions)],
  ],
  draft: [
    ["sessions", (w) => String(w.status.running_sessions)],
    ["drafters", (w) => w.drafters.join(", ")],
    ["proposals/s", (w) => shown(rate(w, "proposals"), 1)],
    ["hits", (w) => percent(rate(w, "hits", "proposals"))],
    ["ms a proposal", (w) => shown(rate(w, "draft_ns", "proposals") / 1e6, 1)],
  ],
};

function row(worker, columns) {
  const cells = [
    el(
      "th",
      { scope: "row" },
      worker.worker_id,
      el("span", { class: "note" }, `process ${worker.process_id} on ${worker.host}`),
    ),
    el("td", { "data-name": "health" }, worker.status ? "answers" : el("strong", { class: "error" }, "does not answer")),
    ...columns.map(([name, value]) => el("td", { "data-name": name }, worker.status ? value(worker) : "–")),
  ];
  return el("tr", {}, ...cells);
}

function section(pool) {
  const columns = COLUMNS[pool.role];
  const names = ["worker", "health", ...columns.map(([name]) => name)];
  const states = Object.entries(pool.replicas).map(([state, count]) => `${count} ${state.toLowerCase()}`);
  const replicas = states.join(", ") || "none";
  const heading = pool.role === "target" ? "Targets" : "Draft workers";
  return el(
    "section",
    { class: "pool" },
    el("h2", {}, `${heading} of ${pool.models.join(", ")}`),
    el(
      "p",
      { class: pool.health === "HEALTHY" ? "" : "error" },
      `${pool.health.toLowerCase()}; replicas: ${replicas}; known here: ${pool.workers.length}`,
    ),
    pool.workers.length
      ? el(
          "table",
          {},
          el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)))),
          el("tbody", {}, ...pool.workers.map((worker) => row(worker, columns))),
        )
      : undefined,
  );
}

async function ask() {
  if (!document.hidden) {
    try {
      const pools = (await get("v1/pools")).data;
      pools.flatMap((pool) => pool.workers).forEach(remember);
      byId("pools").replaceChildren(...pools.map(section));
      byId("state").textContent = "";
    } catch (error) {
      byId("state").textContent = error.message;
    }
  }
  setTimeout(ask, PAUSE_MS);
}

ask();
