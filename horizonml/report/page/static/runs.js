// Keeps the page of all runs up to date, and compares the curves of those that are chosen.

import { get, Refused } from "./api.js";
import { Chart } from "./charts.js";
import { body, byId, el } from "./dom.js";
import { number, percent, seconds } from "./format.js";

const OFTEN = 3000, MOST = 8; // milliseconds between two looks; curves at a time
const charts = {
  loss: new Chart(body("loss"), { what: "Loss on held-out data", unit: "loss", tools: true }),
  accuracy: new Chart(body("accuracy"), { what: "Accuracy on held-out data", unit: "share of correct predictions", format: percent, to: 1, tools: true }),
  training: new Chart(body("training"), { what: "Loss of the training's batches", unit: "loss", tools: true }),
};
const styles = new Map(); // the runs that are compared, each with the number of its colour
let begun = false, shown = "";

function notice(words) {
  byId("notice").hidden = !words;
  byId("notice").textContent = words;
}

function choose(name, wanted) {
  if (!wanted) styles.delete(name);
  else if (styles.size < MOST) styles.set(name, [...Array(MOST).keys()].find((style) => ![...styles.values()].includes(style)));
  look();
}

function row(run) {
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: styles.has(run.name), disabled: !styles.has(run.name) && styles.size >= MOST,
    onchange: (event) => choose(run.name, event.target.checked) });
  const ranks = run.ranks === run.devices ? "" : ` (${number(run.ranks)} ranks)`;
  return el("tr", {},
    el("td", {}, box), el("th", { scope: "row" }, el("a", { href: `run/${encodeURIComponent(run.name)}/` }, run.name)),
    el("td", {}, el("span", { class: `badge ${run.state}` }, run.state === "lost" ? "silent" : run.state)),
    el("td", { class: "number" }, `${number(run.step)}${run.steps ? ` of ${number(run.steps)}` : ""}`),
    el("td", { class: "number" }, number(run.loss)), el("td", { class: "number" }, percent(run.accuracy)),
    el("td", { class: "number" }, `${number(run.devices)}${ranks}`), el("td", { class: "number" }, seconds(run.seconds)));
}

function list(runs) {
  const heads = ["compare", "run", "state", "step", "loss", "accuracy", "devices", "since"];
  const key = JSON.stringify([runs.map((run) => ({ ...run, seconds: seconds(run.seconds) })), [...styles]]);
  if (key === shown) return;
  shown = key;
  if (!runs.length) {
    body("list").replaceChildren(el("p", { class: "note" }, "No run is here yet: `horizonml train digits` begins one."));
    return;
  }
  body("list").replaceChildren(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "All runs" }, el("table", {},
    el("thead", {}, el("tr", {}, heads.map((head, index) => el("th", { scope: "col", class: index > 2 ? "number" : null }, head)))),
    el("tbody", {}, runs.map(row)))));
}

function draw(curves) {
  const series = (pick, index, dots) => Object.entries(curves).map(([name, run]) => ({ name, style: styles.get(name) ?? 0, dots,
    points: run[pick].map((point) => [point[0], point[index] ?? NaN]).filter(([, value]) => Number.isFinite(value)) }));
  charts.loss.set(series("held_out", 1, true));
  charts.accuracy.set(series("held_out", 2, true));
  charts.training.set(series("training", 1, false));
}

async function look() {
  try {
    const found = await get("api/runs");
    const names = new Set(found.runs.map((run) => run.name));
    for (const name of [...styles.keys()]) if (!names.has(name)) styles.delete(name);
    if (!begun) { begun = true; found.runs.slice(0, 4).forEach((run, style) => styles.set(run.name, style)); }
    list(found.runs);
    byId("footer").textContent = `The runs in ${found.folder}. This page loads nothing from elsewhere.`;
    draw(styles.size ? await get(`api/curves?runs=${[...styles.keys()].map(encodeURIComponent).join(";")}`) : {});
    notice("");
  } catch (error) {
    notice(error instanceof Refused ? `The service refused: ${error.message}` : "The connection to the service is lost; trying again. What is shown may be old.");
    if (!(error instanceof Refused) && !(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
  }
}

async function follow() {
  await look();
  setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", follow, { once: true }) : follow()), OFTEN);
}

follow();
