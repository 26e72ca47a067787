// Asks for the token and does what it allows. The token is held by this page only while it is open, and stored nowhere.

import { act } from "./api.js";
import { byId, el } from "./dom.js";

const NAMES = { stop: "Stop after this step, with a checkpoint", start: "Start training now" };

export class Actions {
  constructor(card) {
    this.card = card;
    this.names = "";
    this.token = "";
  }

  set(names) {
    byId("actions").hidden = !names.length;
    if (names.join() === this.names) return;
    this.names = names.join();
    const field = el("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false", oninput: () => { this.token = field.value.trim(); } });
    field.value = this.token;
    this.result = el("p", { role: "status" });
    this.buttons = names.map((name) => el("button", { type: "button", onclick: () => this.run(name) }, NAMES[name] ?? name));
    this.card.replaceChildren(el("form", { onsubmit: (event) => event.preventDefault() },
      el("label", { for: "token" }, "The token (horizonml token --show prints it on a device that has it), which is not stored", field),
      el("div", { class: "buttons" }, this.buttons)), this.result);
  }

  async run(name) {
    this.say("", false);
    if (!this.token) { this.say("Enter the token first.", true); byId("token").focus(); return; }
    for (const button of this.buttons) button.disabled = true;
    try { this.say((await act(name, this.token)).words, false); } catch (error) { this.say(error.message, true); }
    for (const button of this.buttons) button.disabled = false;
  }

  say(words, failed) {
    this.result.className = failed ? "error" : "";
    this.result.textContent = words;
  }
}
