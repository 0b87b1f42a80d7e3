// The tree of a round, drawn from left to right: the accepted path is the thick one.

import { svg } from "./dom.js";
import { label, path } from "./tokens.js";

const ROW = 44;
const HEIGHT = 24;
const GAP = 30;
const CHARACTER = 7.9;
const EDGE = 4;

function width(box) {
  return Math.max(30, 14 + CHARACTER * [...box.label].length);
}

/** Boxes with their parents: the anchor, the nodes, and the target's own token behind the path. */
function boxesOf(round, before, tints) {
  const accepted = path(round);
  const boxes = [{ parent: -1, label: before, kind: "anchor", chosen: true }];
  for (const node of round.nodes) {
    boxes.push({
      parent: node.parent + 1,
      label: label(node.token),
      kind: tints.of(node.drafters),
      chosen: node.accepted,
      note: node.score.toFixed(2),
    });
  }
  const own = round.tokens[round.accepted];
  if (own) {
    const last = accepted.length ? 1 + round.nodes.indexOf(accepted.at(-1)) : 0;
    const kind = round.nodes.length ? "bonus" : "plain";
    boxes.push({ parent: last, label: label(own.token), kind, chosen: true, note: "target's" });
  }
  return boxes;
}

/** Give boxes their places: a column by depth, a row for each leaf; the accepted path comes first. */
function place(boxes) {
  const columns = [];
  let rows = 0;
  const visit = (index, depth) => {
    const box = boxes[index];
    box.depth = depth;
    columns[depth] = Math.max(columns[depth] ?? 0, width(box));
    const children = boxes.map((_, other) => other).filter((other) => boxes[other].parent === index);
    children.sort((a, b) => boxes[b].chosen - boxes[a].chosen);
    box.row = rows;
    children.forEach((child, number) => {
      if (number) rows += 1;
      visit(child, depth + 1);
    });
  };
  boxes[0].parent = undefined;
  visit(0, 0);
  let x = EDGE;
  const starts = columns.map((wide) => {
    const start = x;
    x += wide + GAP;
    return start;
  });
  for (const box of boxes) {
    box.x = starts[box.depth];
    box.y = EDGE + box.row * ROW;
  }
  return [x - GAP + EDGE, (rows + 1) * ROW];
}

function edge(from, to) {
  const x = from.x + width(from);
  const y = from.y + HEIGHT / 2;
  const bend = (to.x - x) / 2;
  const end = to.y + HEIGHT / 2;
  return svg("path", {
    class: to.chosen ? "edge chosen" : "edge",
    d: `M${x} ${y}C${x + bend} ${y} ${to.x - bend} ${end} ${to.x} ${end}`,
  });
}

function drawn(box) {
  const middle = box.x + width(box) / 2;
  return svg(
    "g",
    { class: `box ${box.kind}${box.chosen ? " chosen" : ""}` },
    svg("rect", { x: box.x, y: box.y, width: width(box), height: HEIGHT, rx: 5 }),
    svg("text", { class: "token", x: middle, y: box.y + 16 }, box.label),
    box.note ? svg("text", { class: "score", x: middle, y: box.y + HEIGHT + 11 }, box.note) : undefined,
  );
}

/** The drawing of a round behind a token of this label. */
export function drawTree(round, before, tints) {
  const boxes = boxesOf(round, before, tints);
  const [wide, high] = place(boxes);
  const edges = boxes.slice(1).map((box) => edge(boxes[box.parent], box));
  // Thick lines lie above thin ones.
  edges.sort((a, b) => a.classList.contains("chosen") - b.classList.contains("chosen"));
  return svg(
    "svg",
    { class: "tree", width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" },
    ...edges,
    ...boxes.map(drawn),
  );
}
