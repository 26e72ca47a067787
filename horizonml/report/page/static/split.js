// Draws how much of a step each rank computes, transfers and waits.

import { el, legend, picture, sized, svg, table, Table } from "./dom.js";
import { percent, seconds } from "./format.js";

const KINDS = ["compute", "transfer", "wait"], ROW = 30, LEFT = 54, RIGHT = 66, TOP = 4;

export class Split {
  constructor(card) {
    this.figure = el("div");
    this.note = el("p", { class: "note" });
    this.table = new Table("Time by rank");
    card.replaceChildren(this.figure, legend(KINDS.map((kind) => [`k-${kind}`, kind])), this.note, this.table.element);
    this.ranks = [];
    this.redraw = sized(this.figure, (width) => this.draw(width));
  }

  set(run) {
    this.ranks = run.ranks.filter((rank) => rank.seconds);
    const elsewhere = run.ranks.length - this.ranks.length;
    this.note.textContent = this.ranks.length ? `Means over the last steps.${elsewhere ? ` The times of ${elsewhere} other ranks are recorded on their own machines.` : ""}` : "";
    this.table.set(() => table("Means over the last steps", ["rank", { name: "step", number: true }, ...KINDS.map((name) => ({ name, number: true })), { name: "against the plan", number: true }],
      this.ranks.map((rank) => [`${rank.rank} (${rank.host})`, seconds(rank.seconds), ...KINDS.map((kind) => `${seconds(rank.split[kind] * rank.seconds)} (${percent(rank.split[kind])})`), rank.slowdown ? `${rank.slowdown.toFixed(2)} times` : "–"])));
    this.redraw();
  }

  draw(width) {
    if (!this.ranks.length) {
      this.figure.replaceChildren(el("p", { class: "note" }, "No step is done yet."));
      return;
    }
    const longest = Math.max(...this.ranks.map((rank) => rank.seconds)), scale = (width - LEFT - RIGHT) / longest;
    const height = TOP + ROW * this.ranks.length;
    this.figure.replaceChildren(picture(width, height, this.words(), this.ranks.map((rank, index) => {
      let x = LEFT;
      const y = TOP + index * ROW;
      return [svg("text", { x: 0, y: y + 17 }, `rank ${rank.rank}`),
        KINDS.map((kind) => {
          const wide = rank.split[kind] * rank.seconds * scale;
          x += wide;
          return [svg("rect", { class: `k-${kind}`, x: x - wide, y: y + 2, width: Math.max(0, wide), height: ROW - 8 })];
        }),
        svg("text", { class: "soft", x: width, y: y + 17, "text-anchor": "end" }, seconds(rank.seconds))];
    })));
  }

  words() {
    return `Time split of a step. ${this.ranks.slice(0, 16).map((rank) => `Rank ${rank.rank}: ${KINDS.map((kind) => `${kind} ${percent(rank.split[kind])}`).join(", ")}`).join(". ")}.`;
  }
}
