// Asks the planner what other devices or links would change, and shows its plan beside the present one.

import { get } from "./api.js";
import { el, table, Table } from "./dom.js";
import { megabits, memory, number, percent, seconds } from "./format.js";
import { PlanPicture } from "./plan.js";

const WAIT = 45; // seconds
const STRATEGIES = [["", "as the job says"], ["auto", "auto: whatever is fastest"], ["ddp", "ddp"], ["pipeline", "pipeline"], ["hybrid", "hybrid"]];
const SPEEDS = [0.1, 0.2, 0.25, 0.33, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 10];
const RATES = [1, 2, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2500, 5000, 10000]; // Mbit/s

// A slider over a list of values, with the chosen value in words.
function slider(id, words, values, chosen, say) {
  const output = el("output", { class: "value", for: id });
  const input = el("input", { type: "range", id, min: 0, max: values.length - 1, step: 1, value: chosen });
  const show = () => {
    const text = say(values[Number(input.value)]);
    output.textContent = text;
    input.setAttribute("aria-valuetext", text);
  };
  input.addEventListener("input", show);
  show();
  return { element: el("div", {}, el("label", { for: id }, words, output), input), value: () => values[Number(input.value)], reset: () => { input.value = chosen; show(); }, set: (value) => { input.value = value; show(); } };
}

function select(id, words, options) {
  const input = el("select", { id }, options.map(([value, text]) => el("option", { value }, text)));
  return { element: el("div", {}, el("label", { for: id }, words), input), input };
}

const who = (rank) => (rank.name || rank.host ? `rank ${rank.rank} (${rank.name || rank.host})` : `rank ${rank.rank}`);

export class WhatIf {
  constructor(card) {
    this.card = card;
    this.key = "";
  }

  // The form is made anew only when the ranks have changed, or what has been entered would be lost.
  set(run) {
    const key = run.ranks.map((rank) => `${rank.rank} ${who(rank)}`).join(";");
    if (key === this.key || !run.ranks.length) return;
    this.key = key;
    this.run = run;
    this.keep = run.ranks.map((rank) => el("input", { type: "checkbox", id: `keep-${rank.rank}`, checked: true }));
    this.count = el("input", { type: "number", id: "add-count", min: 0, max: 16, value: 0, inputmode: "numeric" });
    this.like = select("add-like", "like", run.ranks.map((rank) => [rank.rank, who(rank)]));
    this.speed = slider("add-speed", "its speed", SPEEDS, SPEEDS.indexOf(1), (value) => (value === 1 ? "the same" : `${value} times as fast`));
    this.wire = slider("add-rate", "its link", [0, ...RATES], 0, (value) => (value ? `${number(value)} Mbit/s` : "the same"));
    this.link = select("link", "which link", this.links());
    this.rate = slider("rate", "rate", RATES, RATES.indexOf(100), (value) => `${number(value)} Mbit/s`);
    this.strategy = select("strategy", "strategy", STRATEGIES);
    this.ask = el("button", { type: "submit", class: "main" }, "Predict");
    this.status = el("p", { class: "verdict", role: "status" });
    this.result = el("div");
    this.card.replaceChildren(this.form(), this.status, this.result);
    this.link.input.addEventListener("change", () => this.start());
  }

  links() {
    const ranks = this.run.ranks.map((rank) => rank.rank), pairs = [];
    if (ranks.length <= 12) for (const one of ranks) for (const other of ranks) if (one < other) pairs.push([`${one}-${other}`, `between ranks ${one} and ${other}${this.measured(one, other)}`]);
    return [["", "none: as measured"], ["all", "all links"], ...ranks.map((rank) => [`${rank}`, `all links of rank ${rank}`]), ...pairs];
  }

  measured(one, other) {
    const found = this.run.links.find((link) => link.from === one && link.to === other && link.rate);
    return found ? `, now ${megabits(found.rate)}` : "";
  }

  // The slider begins where the link is now.
  start() {
    const [one, other] = this.link.input.value.split("-").map(Number);
    const rates = this.run.links.filter((link) => link.rate && (this.link.input.value === "all" || (other === undefined ? link.from === one : link.from === one && link.to === other))).map((link) => (8 * link.rate) / 1e6);
    if (!rates.length) return;
    const now = Math.min(...rates);
    this.rate.set(RATES.reduce((best, rate, index) => (Math.abs(Math.log(rate / now)) < Math.abs(Math.log(RATES[best] / now)) ? index : best), 0));
  }

  form() {
    const leave = el("fieldset", {}, el("legend", {}, "Devices that stay"), this.run.ranks.map((rank, index) => el("label", { class: "check", for: `keep-${rank.rank}` }, this.keep[index], who(rank))));
    const add = el("fieldset", {}, el("legend", {}, "Devices that join"), el("div", { class: "fields" },
      el("div", {}, el("label", { for: "add-count" }, "how many"), this.count), this.like.element, this.speed.element, this.wire.element));
    const link = el("fieldset", {}, el("legend", {}, "Links that change"), el("div", { class: "fields" }, this.link.element, this.rate.element));
    const how = el("fieldset", {}, el("legend", {}, "Planned by"), this.strategy.element);
    return el("form", { "aria-label": "What if", onsubmit: (event) => { event.preventDefault(); this.predict(); }, onreset: () => setTimeout(() => this.reset()) },
      el("div", { class: "columns" }, el("div", { class: "stack" }, leave, how), add, link),
      el("div", { class: "buttons" }, this.ask, el("button", { type: "reset" }, "Reset")));
  }

  reset() {
    for (const one of [this.speed, this.wire, this.rate]) one.reset();
    this.say("", false);
    this.result.replaceChildren();
  }

  query() {
    const removed = this.run.ranks.filter((_, index) => !this.keep[index].checked).map((rank) => rank.rank);
    const one = [`like:${this.like.input.value}`, this.speed.value() === 1 ? null : `speed=${this.speed.value()}`, this.wire.value() ? `rate=${this.wire.value()}Mbit` : null].filter(Boolean).join(",");
    const count = Math.max(0, Math.min(16, Math.floor(Number(this.count.value) || 0)));
    const found = new URLSearchParams();
    if (removed.length) found.set("remove", removed.join(";"));
    if (count) found.set("add", Array(count).fill(one).join(";"));
    if (this.link.input.value) found.set("rates", `${this.link.input.value}:${this.rate.value()}Mbit`);
    if (this.strategy.input.value) found.set("strategy", this.strategy.input.value);
    return found;
  }

  say(words, failed) {
    this.status.className = failed ? "verdict error" : "verdict";
    this.status.textContent = words;
  }

  async predict() {
    this.ask.disabled = true;
    this.say("Planning …", false);
    try {
      this.show(await get(`api/what-if?${this.query()}`, WAIT));
    } catch (error) {
      this.result.replaceChildren();
      this.say(error.name === "TimeoutError" ? "There was no answer in time; ask for fewer devices." : error instanceof TypeError ? "The connection to the service is lost." : error.message, true);
    }
    this.ask.disabled = false;
    this.ask.focus();
  }

  show(found) {
    const { present, predicted } = found;
    const [verdict, ...changes] = found.changes;
    this.say(verdict, false);
    const list = (words, items) => (items.length ? [el("h3", {}, words), el("ul", {}, items.map((item) => el("li", {}, item)))] : []);
    const side = (words, plan, more) => {
      const place = el("div"), picture = new PlanPicture(place, `${words}: the plan`);
      picture.set(plan.plan, [], new Map(plan.devices.map((device) => [device.rank, device.name])));
      return el("div", {}, el("h3", {}, `${words}: ${seconds(plan.seconds)} a step`), el("p", { class: "note" }, `${number(plan.samples_per_second)} samples per second, as predicted${more}. ${plan.fits ? "" : "It does not fit into memory."}`), place);
    };
    const measured = present.measured_seconds ? `; measured: ${seconds(present.measured_seconds)} a step` : "";
    const scaled = predicted.scaled_seconds ? `; adjusted to what was measured: ${seconds(predicted.scaled_seconds)} a step` : "";
    const devices = new Table("Devices after the change");
    devices.set(() => table("Devices after the change", ["rank", "name", { name: "was rank", number: true }, { name: "speed", number: true }, { name: "needs", number: true }, { name: "computes", number: true }],
      predicted.devices.map((device) => [`${device.rank}`, device.name, device.was === null ? "new" : device.was, number(device.speed, 2), `${memory(device.needs)} of ${memory(device.memory)}`, percent(device.busy)])));
    this.result.replaceChildren(...list("What changes", changes), el("div", { class: "compare" }, side("Now", present, measured), side("After the change", predicted, scaled)),
      ...list("Why", found.why), ...list("Keep in mind", found.notes), devices.element);
  }
}
