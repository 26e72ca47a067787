// Draws the devices as nodes of a ring, what flows between them, and how fast their links are.

import { el, legend, picture, sized, svg, table, Table } from "./dom.js";
import { memory, megabits, number, percent, rate, seconds } from "./format.js";

const MOST_LINKS = 120; // lines of links that carry nothing

// Joins both directions of a pair of ranks: what flows between the two, and the measured rate.
export function pairs(run) {
  const found = new Map();
  const pair = (one, other) => {
    const key = one < other ? `${one}-${other}` : `${other}-${one}`;
    if (!found.has(key)) found.set(key, { one: Math.min(one, other), other: Math.max(one, other), activations: 0, gradients: 0, most: 0, rate: null, latency: null });
    return found.get(key);
  };
  for (const link of run.links) {
    const known = pair(link.from, link.to);
    if (link.what) { known[link.what] += link.flow; known.most = Math.max(known.most, link.flow); }
    if (link.rate) { known.rate = Math.min(known.rate ?? Infinity, link.rate); known.latency = Math.max(known.latency ?? 0, link.latency ?? 0); }
  }
  return [...found.values()];
}

export class Topology {
  constructor(card) {
    this.figure = el("div");
    this.note = el("p", { class: "note" });
    this.devices = new Table("Devices");
    this.links = new Table("Links");
    card.replaceChildren(this.figure, legend([["f0", "activations and their gradients"], ["f1", "gradients that members sum"]]), this.note, this.devices.element, this.links.element);
    this.run = null;
    this.redraw = sized(this.figure, (width) => this.draw(width));
  }

  set(run) {
    this.run = run;
    this.devices.set(() => table("Devices of this run", ["rank", "machine", "processor", { name: "cores", number: true }, { name: "memory", number: true }, { name: "in use", number: true }, { name: "computes", number: true }],
      run.ranks.map((rank) => [`${rank.rank}`, rank.host || "elsewhere", [rank.processor, rank.architecture].filter(Boolean).join(", ") || "–", number(rank.cores, 2), memory(rank.memory), memory(rank.rss_bytes), percent(rank.split.compute)])));
    this.links.set(() => table("Links between ranks", ["between", { name: "activations", number: true }, { name: "gradients", number: true }, { name: "measured rate", number: true }, { name: "latency", number: true }],
      pairs(run).map((pair) => [`${pair.one} and ${pair.other}`, rate(pair.activations), rate(pair.gradients), pair.rate ? `${rate(pair.rate)} (${megabits(pair.rate)})` : "–", pair.latency === null ? "–" : seconds(pair.latency)])));
    this.note.textContent = run.ranks.some((rank) => !rank.is_recorded)
      ? "Ranks with a dashed edge keep their records on their own machines."
      : run.links.some((link) => link.rate) ? "The width of a line shows how much flows over it; “of …” is the measured rate of the link." : "The width of a line shows how much flows over it. The links of this run were not measured.";
    this.redraw();
  }

  draw(width) {
    const run = this.run;
    if (!run || !run.ranks.length) {
      this.figure.replaceChildren(el("p", { class: "note" }, "No rank has reported its machine yet."));
      return;
    }
    const count = run.ranks.length;
    const box = { width: count > 12 ? 58 : Math.min(124, width / 3.1), height: count > 12 ? 30 : 50 };
    const height = count === 1 ? 120 : Math.min(460, Math.max(width < 480 ? 340 : 290, 40 * count + 110));
    const middle = [width / 2, height / 2], radius = [(width - box.width) / 2 - 2, (height - box.height) / 2 - 4];
    const place = new Map(run.ranks.map((rank, index) => {
      const angle = -Math.PI / 2 + (2 * Math.PI * (index + (count === 2 ? 0.5 : 0))) / count;
      return [rank.rank, count === 1 ? middle : [middle[0] + radius[0] * Math.cos(angle), middle[1] + radius[1] * Math.sin(angle)]];
    }));
    const links = pairs(run).filter((pair) => place.has(pair.one) && place.has(pair.other));
    const busy = links.filter((pair) => pair.most > 0), most = Math.max(1, ...busy.map((pair) => pair.most));
    const idle = links.filter((pair) => pair.most === 0).slice(0, MOST_LINKS);
    this.figure.replaceChildren(picture(width, height, this.words(busy),
      idle.map((pair) => this.line(pair, place, "link", 1.5)),
      busy.map((pair) => this.flow(pair, place, most)),
      count <= 12 ? this.labels(busy, place, width, box) : null,
      run.ranks.map((rank) => this.node(rank, place.get(rank.rank), box))));
  }

  line({ one, other }, place, style, wide) {
    const [[x1, y1], [x2, y2]] = [place.get(one), place.get(other)];
    return svg("line", { class: style, x1, y1, x2, y2, "stroke-width": wide });
  }

  flow(pair, place, most) {
    const what = pair.activations >= pair.gradients ? "activations" : "gradients";
    const wide = 2.5 + 9 * Math.sqrt(pair.most / most);
    return [this.line(pair, place, `flow ${what}`, wide.toFixed(1)), this.line(pair, place, "pulse", Math.max(1.5, wide / 2.5).toFixed(1))];
  }

  // A label stands where its line's middle is, moved along the line where another label stands already.
  labels(busy, place, width, box) {
    const taken = [];
    return busy.map((pair) => {
      const words = [rate(Math.max(pair.activations, pair.gradients)), pair.rate && width >= 480 ? `of ${rate(pair.rate)}` : null].filter(Boolean);
      const [[x1, y1], [x2, y2]] = [place.get(pair.one), place.get(pair.other)];
      const narrow = Math.abs(y1 - y2) < box.height && Math.abs(x1 - x2) < box.width + 76 ? box.height / 2 + 12 : 0; // no room between the boxes
      const spots = [0.5, 0.42, 0.58, 0.36, 0.64, 0.3, 0.7].map((part) => [x1 + part * (x2 - x1), y1 + part * (y2 - y1) + narrow]);
      const free = spots.find(([x, y]) => taken.every(([a, b]) => Math.abs(a - x) > 78 || Math.abs(b - y) > 16 * words.length)) ?? spots[0];
      taken.push(free);
      const x = Math.min(width - 42, Math.max(42, free[0]));
      return words.map((line, index) => svg("text", { class: `halo${index ? " soft" : ""}`, x, y: free[1] + 4 + 14 * index - 7 * (words.length - 1), "text-anchor": "middle" }, line));
    });
  }

  node(rank, [x, y], { width, height }) {
    const style = `f${rank.rank % 8} s${rank.rank % 8} tint`;
    const area = { x: x - width / 2, y: y - height / 2, width, height, rx: 9 };
    const room = Math.max(3, Math.floor(width / 6.6));
    const short = (text) => (text.length > room ? `${text.slice(0, room - 1)}…` : text);
    const where = rank.host || "elsewhere";
    return svg("g", {}, svg("title", {}, `rank ${rank.rank} on ${where}`), svg("rect", { ...area, class: "under" }), svg("rect", { ...area, class: style, "stroke-dasharray": rank.is_recorded ? null : "4 3" }),
      svg("text", { class: "bold", x, y: height > 40 ? y - 5 : y + 4, "text-anchor": "middle" }, height > 40 ? `rank ${rank.rank}` : rank.rank),
      height > 40 ? svg("text", { class: "soft", x, y: y + 12, "text-anchor": "middle" }, short([where, rank.cores ? `${number(rank.cores, 2)} cores` : null].filter(Boolean).join(", "))) : null);
  }

  words(busy) {
    const each = busy.slice(0, 12).map((pair) => `${rate(Math.max(pair.activations, pair.gradients))} between ranks ${pair.one} and ${pair.other}`);
    return `${this.run.ranks.length} ranks and what flows between them. ${each.join(", ") || "Nothing flows"}.`;
  }
}
