// Draws a plan: layers from left to right, and the samples of a micro-batch from top to bottom, shared out to ranks.

import { el, picture, sized, svg, table, Table } from "./dom.js";
import { percent, plural } from "./format.js";

const TOP = 22, BOTTOM = 24;

export function parts(plan) {
  return plan.stages.flatMap((stage, number) => {
    const shares = stage.shares ?? stage.ranks.map(() => 1);
    const total = shares.reduce((sum, share) => sum + share, 0) || 1;
    let begin = 0;
    return stage.ranks.map((rank, index) => {
      const share = shares[index] / total;
      begin += share;
      return { stage: number, rank, share, begin: begin - share, first: stage.start, stop: stage.stop };
    });
  });
}

export class PlanPicture {
  constructor(card, what = "The plan") {
    this.figure = el("div");
    this.note = el("p", { class: "note" });
    this.table = new Table(what);
    card.replaceChildren(this.figure, this.note, this.table.element);
    this.plan = null;
    this.redraw = sized(this.figure, (width) => this.draw(width));
  }

  set(plan, layers = [], names = new Map()) {
    Object.assign(this, { plan, layers, names });
    this.note.textContent = plan.stages.length ? this.sentence() : "";
    const span = (part) => (layers.length >= part.stop ? ` (${layers[part.first]} … ${layers[part.stop - 1]})` : "");
    this.table.set(() => table("Which rank computes what", ["rank", { name: "stage", number: true }, "layers", { name: plan.stages.some((stage) => stage.sync === "channels") ? "share of channels" : "share of samples", number: true }],
      parts(plan).map((part) => [this.who(part.rank), `${part.stage}`, `${part.first} to ${part.stop - 1}${span(part)}`, percent(part.share)])));
    this.redraw();
  }

  who(rank) {
    return this.names.has(rank) ? `${rank} (${this.names.get(rank)})` : `${rank}`;
  }

  sentence() {
    const { stages, schedule, micro_batches: micro } = this.plan;
    const split = stages.some((stage) => stage.sync === "channels") ? "Members split the channels of layers. " : "";
    const formats = [...new Set(stages.slice(0, -1).map((stage) => stage.send).filter((format) => format && format !== "fp32"))];
    return `${plural(stages.length, "stage")}${stages.length > 1 ? `, ${schedule} with ${micro === 1 ? "one micro-batch" : `${micro} micro-batches`}` : ""}. ${split}${formats.length ? `Activations are sent as ${formats.join(", ")}. ` : ""}From left to right: layers; from top to bottom: ${split ? "channels" : "the samples of a batch"}.`;
  }

  draw(width) {
    const plan = this.plan;
    if (!plan || !plan.stages.length) {
      this.figure.replaceChildren(el("p", { class: "note" }, "There is no plan yet."));
      return;
    }
    const layers = Math.max(...plan.stages.map((stage) => stage.stop), 1);
    // A stage of few layers is drawn wide enough to be read, at the cost of the others.
    const least = Math.min(46, (0.6 * width) / plan.stages.length);
    const rest = width - 2 - least * plan.stages.length;
    const wide = plan.stages.map((stage) => least + (rest * (stage.stop - stage.start)) / layers);
    const left = wide.map((_, index) => 1 + wide.slice(0, index).reduce((sum, one) => sum + one, 0));
    const height = width > 480 ? 270 : 200, tall = height - TOP - BOTTOM;
    this.figure.replaceChildren(picture(width, height, this.words(),
      plan.stages.map((stage, index) => [
        svg("text", { class: "soft", x: left[index] + wide[index] / 2, y: 14, "text-anchor": "middle" }, wide[index] > 60 ? `stage ${index}` : index),
        svg("text", { class: "soft", x: left[index] + wide[index] / 2, y: height - 8, "text-anchor": "middle" }, this.range(stage, wide[index])),
      ]),
      parts(plan).map((part) => {
        const [x, y] = [left[part.stage] + 1.5, TOP + part.begin * tall + 1];
        const [w, h] = [wide[part.stage] - 3, Math.max(2, part.share * tall - 2)];
        const words = w > 96 ? `rank ${part.rank} · ${percent(part.share)}` : w > 52 ? `rank ${part.rank}` : `${part.rank}`;
        return svg("g", {}, svg("title", {}, `stage ${part.stage}, rank ${this.who(part.rank)}: layers ${part.first} to ${part.stop - 1}, ${percent(part.share)}`),
          svg("rect", { x, y, width: w, height: h, rx: 5, class: `f${part.rank % 8} s${part.rank % 8} tint` }),
          h > 13 ? svg("text", { class: "bold", x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle" }, words) : null);
      })));
  }

  range(stage, wide) {
    const text = stage.stop - stage.start > 1 ? `${stage.start}–${stage.stop - 1}` : `${stage.start}`;
    return wide > 90 ? `layers ${text}`.replace("layers", stage.stop - stage.start > 1 ? "layers" : "layer") : text;
  }

  words() {
    return `A plan of ${plural(this.plan.stages.length, "stage")}. ${this.plan.stages.slice(0, 20).map((stage, index) => `Stage ${index}: layers ${stage.start} to ${stage.stop - 1} on rank ${stage.ranks.join(", ")}`).join(". ")}.`;
  }
}
