// Lists what has happened, the newest first.

import { el } from "./dom.js";
import { clock, number } from "./format.js";

const MOST = 30;
const NAMES = { slow: "speed" };
const STYLE = { lost: "bad", checkpoint: "bad", joined: "good" };

export class Events {
  constructor(card) {
    this.list = el("ol", { class: "events", reversed: true });
    this.more = el("button", { type: "button", hidden: true, onclick: () => { this.all = true; this.show(); } });
    this.frame = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events, the newest first" }, this.list);
    card.replaceChildren(this.frame, this.more);
    this.all = false;
    this.events = [];
    this.shown = "";
  }

  set(events) {
    this.events = events;
    this.show();
  }

  show() {
    const found = [...this.events].reverse().slice(0, this.all ? undefined : MOST);
    const key = `${this.events.length} ${this.all} ${this.events.at(-1)?.time}`;
    if (key === this.shown) return;
    this.shown = key;
    this.list.replaceChildren(...found.map((event) => el("li", { class: STYLE[event.kind] ?? null },
      el("time", { datetime: new Date(1000 * event.time).toISOString() }, clock(event.time)),
      el("span", {}, el("span", { class: "kind" }, `${NAMES[event.kind] ?? event.kind} `), `${event.text} `, el("span", { class: "note" }, `(step ${number(event.step)})`)))));
    if (!found.length) this.list.replaceChildren(el("li", {}, el("span"), "Nothing has happened yet."));
    this.more.hidden = this.all || this.events.length <= MOST;
    this.more.textContent = `Show all ${this.events.length} events`;
  }
}
