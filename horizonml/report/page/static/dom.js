// Makes elements. Every text becomes a text node: names come from other machines, and are never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);
export const body = (id) => byId(id).querySelector(".body");

export function picture(width, height, label, ...children) {
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label }, ...children);
}

export function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([kind, words]) =>
    el("li", {}, fill(svg("svg", { viewBox: "0 0 14 10", "aria-hidden": "true" }), {}, [svg("rect", { width: 14, height: 10, rx: 2, class: kind })]), words)));
}

// A table that stands for a picture. It is made when it is opened, and again while it is open.
export class Table {
  constructor(words) {
    this.words = words;
    this.make = () => null;
    this.inner = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": words });
    this.element = el("details", { ontoggle: () => this.show() }, el("summary", {}, `${words} as a table`), this.inner);
  }

  set(make) {
    this.make = make;
    this.show();
  }

  show() {
    if (this.element.open) this.inner.replaceChildren(this.make());
  }
}

export function table(caption, heads, rows) {
  const cell = (value, index) => (index === 0 ? el("th", { scope: "row" }, value) : el("td", { class: heads[index].number ? "number" : null }, value));
  return el("table", {}, el("caption", {}, caption),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col", class: head.number ? "number" : null }, head.name ?? head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))));
}

// Calls `draw` with the width of an element, now and whenever it has changed.
export function sized(element, draw) {
  let width = 0;
  const again = () => {
    const now = Math.floor(element.clientWidth);
    if (now > 0 && now !== width) { width = now; draw(width); }
  };
  new ResizeObserver(again).observe(element);
  return () => { width = 0; again(); };
}
