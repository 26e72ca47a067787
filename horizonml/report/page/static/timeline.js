// Draws what each rank did when in one step.

import { get } from "./api.js";
import { el, legend, picture, sized, svg, table, Table } from "./dom.js";
import { number, seconds } from "./format.js";
import { ticks } from "./charts.js";

const ROW = 34, LEFT = 54, RIGHT = 8, BOTTOM = 24;

// Forward and backward passes are told apart, because their order is what a schedule is about.
const style = (kind, what) => (kind === "compute" && what.startsWith("backward") ? "k-backward" : `k-${kind}`);

export class Timeline {
  constructor(card) {
    this.figure = el("div");
    this.note = el("p", { class: "note" });
    this.readout = el("p", { class: "readout" });
    this.table = new Table("The step");
    this.predicted = false;
    this.toggle = el("button", { type: "button", hidden: true, "aria-pressed": "false", onclick: () => this.change() }, "Show the predicted step");
    card.replaceChildren(this.figure, legend([["k-compute", "forward and other computing"], ["k-backward", "backward"], ["k-transfer", "transfer"], ["k-wait", "wait"]]), this.readout, this.note, this.toggle, this.table.element);
    this.found = null;
    this.redraw = sized(this.figure, (width) => this.draw(width));
  }

  // Where to ask for a step. One that is shown is not sent again, except for a simulated one, which a real one replaces.
  get path() {
    const known = this.found && !this.found.is_simulated ? this.found.step : -1;
    return this.predicted ? "api/timeline?predicted=1" : `api/timeline?known=${known}`;
  }

  offer(both) {
    this.toggle.hidden = !both;
  }

  async change() {
    this.predicted = !this.predicted;
    this.toggle.setAttribute("aria-pressed", this.predicted);
    try { this.set(await get(this.path)); } catch { this.note.textContent = "The connection to the service is lost; trying again."; }
  }

  set(found) {
    if (found && (!found.ranks || found.is_simulated !== this.predicted && this.predicted)) return; // it is shown already, or comes too late
    this.found = found;
    this.note.textContent = !found ? "" : found.is_simulated
      ? `Simulated: this is what the planner predicts for the plan.${this.predicted ? "" : " No step is recorded in detail yet."}`
      : `Step ${number(found.step)}, as the ranks whose records are here recorded it by their own clocks.`;
    this.table.set(() => (found ? table(found.is_simulated ? "The predicted step" : `Step ${number(found.step)}`, ["rank", "what", { name: "micro-batch", number: true }, { name: "begins", number: true }, { name: "takes", number: true }],
      found.ranks.flatMap(({ rank, spans }) => spans.slice(0, 100).map(([kind, what, micro, begin, end]) => [`${rank}`, `${kind}: ${what}`, micro < 0 ? "–" : micro, seconds(begin), seconds(end - begin)]))) : el("p", {}, "No step is recorded in detail yet.")));
    this.redraw();
  }

  draw(width) {
    const found = this.found;
    if (!found || !(found.seconds > 0)) {
      this.figure.replaceChildren(el("p", { class: "note" }, "No step is recorded in detail yet; the job's field telemetry.timeline_every says how often one is."));
      return;
    }
    const height = ROW * found.ranks.length + BOTTOM, scale = (width - LEFT - RIGHT) / found.seconds;
    const x = (time) => LEFT + time * scale;
    this.figure.replaceChildren(picture(width, height, this.words(),
      ticks(0, found.seconds, Math.max(2, Math.floor(width / 110))).map((mark) => [
        svg("line", { class: "grid", x1: x(mark), x2: x(mark), y1: 0, y2: height - BOTTOM }),
        svg("text", { class: "soft", x: x(mark), y: height - 7, "text-anchor": "middle" }, seconds(mark))]),
      found.ranks.map(({ rank, spans }, row) => [
        svg("text", { x: 0, y: row * ROW + 21 }, `rank ${rank}`),
        spans.map(([kind, what, micro, begin, end]) => {
          const wide = Math.max(0.4, (end - begin) * scale);
          const bar = svg("rect", { class: style(kind, what), x: x(begin).toFixed(2), y: row * ROW + 5, width: wide.toFixed(2), height: ROW - 10 });
          bar.addEventListener("pointerenter", () => { this.readout.textContent = `rank ${rank}, ${kind}: ${what}${micro < 0 ? "" : `, micro-batch ${micro}`}, ${seconds(end - begin)}`; });
          const shown = micro >= 0 && wide > 16 && kind === "compute";
          return [bar, shown ? svg("text", { class: "on-bar", x: x(begin) + wide / 2, y: row * ROW + 21, "text-anchor": "middle", "pointer-events": "none" }, micro) : null];
        })])));
  }

  words() {
    const { ranks, seconds: all } = this.found;
    const share = (spans, kind) => Math.round((100 * spans.filter((span) => span[0] === kind).reduce((sum, span) => sum + span[4] - span[3], 0)) / all);
    return `What ${ranks.length} ranks did in a step of ${seconds(all)}. ${ranks.slice(0, 16).map(({ rank, spans }) => `Rank ${rank} computed ${share(spans, "compute")}% of it, in ${spans.length} parts`).join(". ")}.`;
  }
}
