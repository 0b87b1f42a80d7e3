// Elements without markup: all that comes from a server or a model becomes text or an attribute's value.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== undefined));
  return made;
}

/** An HTML element; children are elements or texts. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** An element of a drawing. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** A number with so many decimals; a dash if there is none. */
export function shown(value, decimals = 0) {
  return Number.isFinite(value) ? value.toFixed(decimals) : "–";
}

/** A share as a percentage. */
export function percent(share) {
  return Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–";
}
