// Draws curves over steps.

import { el, legend, picture, sized, svg, table, Table } from "./dom.js";
import { number } from "./format.js";

const TOP = 10, BOTTOM = 34, RIGHT = 10, HEIGHT = 220;

export function ticks(low, high, most) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough - 1e-12 * span);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * span; at += 1) found.push(at * step + 0);
  return found;
}

function bounds(series, from, to) {
  let [low, high] = [Infinity, -Infinity];
  for (const { points } of series) for (const [, y] of points) if (Number.isFinite(y)) { low = Math.min(low, y); high = Math.max(high, y); }
  if (!Number.isFinite(low)) return [0, 1];
  const space = 0.04 * (high - low);
  if (from !== undefined) low = Math.min(from, low); else low -= space;
  high = to === undefined ? high + space : Math.max(high, to);
  return low === high ? [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)] : [low, high];
}

// Splits a line where a value is missing.
function path(points, x, y) {
  let text = "", pen = "M";
  for (const [step, value] of points) {
    if (!Number.isFinite(value)) { pen = "M"; continue; }
    text += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

// Joins neighbours, so that a line of many noisy steps can be read.
function means(points, most) {
  const every = Math.ceil(points.length / most), found = [];
  for (let at = 0; at < points.length; at += every) {
    const some = points.slice(at, at + every).filter(([, value]) => Number.isFinite(value));
    if (some.length) found.push([some.at(-1)[0], some.reduce((sum, [, value]) => sum + value, 0) / some.length]);
  }
  return found;
}

function nearest(points, step) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  if (low > 0 && step - points[low - 1][0] < points[low][0] - step) low -= 1;
  return points[low];
}

// Exponential means, each of about `steps` points, which begin with the first one.
function smooth(points, steps) {
  const share = 1 / Math.max(1, steps);
  let mean = null;
  return points.map(([step, value]) => {
    if (Number.isFinite(value)) mean = mean === null ? value : mean + share * (value - mean);
    return [step, Number.isFinite(value) ? mean : value];
  });
}

// A chart of `series`, each {name, style, points: [[step, value], ...], dots}, in a card. With `tools`, its scale can be
// logarithmic, its curves smoothed, and some steps chosen by dragging over them.
export class Chart {
  constructor(card, { what, unit, format = number, from, to, most, tools = false }) {
    Object.assign(this, { what, unit, format, from, to, most, all: [], series: [], log: false, means: 1, zoom: null, readout: el("p", { class: "readout" }) });
    this.figure = el("div");
    this.legend = el("div");
    this.table = new Table(what);
    card.replaceChildren(tools ? this.tools() : "", this.figure, this.legend, this.readout, this.table.element);
    this.canZoom = tools;
    this.redraw = sized(this.figure, (width) => this.draw(width));
  }

  tools() {
    const log = el("input", { type: "checkbox", onchange: (event) => { this.log = event.target.checked; this.set(this.all); } });
    const means = el("input", { type: "range", min: 0, max: 6, step: 1, value: 0, oninput: (event) => { this.means = 2 ** event.target.value; this.set(this.all); } });
    this.whole = el("button", { type: "button", hidden: true, onclick: () => { this.zoom = null; this.set(this.all); } }, "All steps");
    return el("div", { class: "tools" }, el("label", {}, log, "logarithmic"), el("label", {}, "smoothed", means), this.whole);
  }

  set(series) {
    this.all = series;
    const seen = (points) => (this.zoom ? points.filter(([step]) => step >= this.zoom[0] && step <= this.zoom[1]) : points);
    const scaled = (points) => (this.log ? points.map(([step, value]) => [step, value > 0 ? Math.log10(value) : NaN]) : points);
    this.series = series.map((one) => ({ ...one, points: scaled(seen(smooth(this.most ? means(one.points, this.most) : one.points, this.means))) })).filter((one) => one.points.length);
    if (this.whole) this.whole.hidden = !this.zoom;
    this.legend.replaceChildren(legend(this.series.map((one) => [`f${one.style}`, one.name])));
    this.table.set(() => this.rows());
    this.redraw();
  }

  words_of(value) {
    return this.format(this.log ? 10 ** value : value);
  }

  draw(width) {
    if (!this.series.length) {
      this.figure.replaceChildren(el("p", { class: "note" }, "No step is done yet."));
      return;
    }
    const [low, high] = this.log ? bounds(this.series) : bounds(this.series, this.from, this.to);
    const steps = this.series.flatMap((one) => [one.points[0][0], one.points.at(-1)[0]]);
    const first = Math.min(...steps), last = Math.max(...steps, first + 1);
    const marks = ticks(low, high, 6);
    const left = 18 + 7 * Math.max(...marks.map((mark) => this.words_of(mark).length));
    const x = (step) => left + ((step - first) / (last - first)) * (width - left - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const drawing = picture(width, HEIGHT, this.words(first, last),
      marks.map((mark) => [svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(mark), y2: y(mark) }),
        svg("text", { class: "soft", x: left - 6, y: y(mark) + 4, "text-anchor": "end" }, this.words_of(mark))]),
      ticks(first, last, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger).map((mark) =>
        svg("text", { class: "soft", x: x(mark), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, number(mark))),
      svg("line", { class: "axis", x1: left, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }),
      svg("text", { class: "soft", x: width - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "step"),
      svg("text", { class: "soft", x: 0, y: HEIGHT - 3 }, this.unit),
      this.series.map((one) => [
        one.points.length > 1 ? svg("path", { class: `line s${one.style}`, d: path(one.points, x, y) }) : null,
        one.dots || one.points.length === 1 ? one.points.filter(([, value]) => Number.isFinite(value)).map(([step, value]) => svg("circle", { class: `f${one.style}`, cx: x(step), cy: y(value), r: 3 })) : null,
      ]));
    const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    drawing.append(cursor);
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      const at = first + (((event.clientX - box.left) * width) / box.width - left) / (width - left - RIGHT) * (last - first);
      const step = nearest(this.series[0].points, at)[0];
      cursor.setAttribute("x1", x(step));
      cursor.setAttribute("x2", x(step));
      cursor.setAttribute("visibility", "visible");
      this.readout.textContent = `Step ${number(step)}: ${this.series.map((one) => { const [where, value] = nearest(one.points, step); return `${one.name} ${this.words_of(value)}${where === step ? "" : ` (step ${number(where)})`}`; }).join(", ")}`;
    });
    if (this.canZoom) this.drag(drawing, (event) => {
      const box = drawing.getBoundingClientRect();
      return first + (((event.clientX - box.left) * width) / box.width - left) / (width - left - RIGHT) * (last - first);
    });
    drawing.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); this.readout.textContent = ""; });
    this.figure.replaceChildren(drawing);
  }

  // Shows only the steps between where a pointer was pressed and where it is released.
  drag(drawing, step) {
    let begin = null;
    drawing.addEventListener("pointerdown", (event) => { begin = step(event); });
    drawing.addEventListener("pointerup", (event) => {
      const [low, high] = [begin, step(event)].sort((a, b) => a - b);
      if (begin !== null && this.series.some((one) => one.points.filter(([at]) => at >= low && at <= high).length > 1)) { this.zoom = [low, high]; this.set(this.all); }
      begin = null;
    });
  }

  words(first, last) {
    const each = this.series.map(({ name, points }) => `${name} from ${this.words_of(points[0][1])} to ${this.words_of(points.at(-1)[1])}`);
    return `${this.what} over steps ${number(first)} to ${number(last)}: ${each.join("; ")}.`;
  }

  rows() {
    const longest = this.series.reduce((most, one) => (one.points.length > most.points.length ? one : most), this.series[0]);
    if (!longest) return el("p", {}, "No step is done yet.");
    const every = Math.ceil(longest.points.length / 60);
    const steps = new Set(longest.points.filter((_, index) => index % every === 0 || index === longest.points.length - 1).map(([step]) => step));
    for (const one of this.series) if (one.dots && one.points.length <= 60) for (const [step] of one.points) steps.add(step);
    const values = this.series.map((one) => new Map(one.points));
    return table(`${this.what} (${this.unit})`, ["step", ...this.series.map((one) => ({ name: one.name, number: true }))],
      [...steps].sort((a, b) => a - b).map((step) => [number(step), ...values.map((known) => (known.has(step) ? this.words_of(known.get(step)) : "–"))]));
  }
}
