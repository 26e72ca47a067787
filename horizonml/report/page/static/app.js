// Keeps the page up to date: asks the service again and again, and hands what has come to the pictures.

import { Actions } from "./actions.js";
import { get, Refused } from "./api.js";
import { Chart } from "./charts.js";
import { body, byId, el, table } from "./dom.js";
import { Events } from "./events.js";
import { number, percent, plural, seconds } from "./format.js";
import { PlanPicture } from "./plan.js";
import { Split } from "./split.js";
import { Timeline } from "./timeline.js";
import { Topology } from "./topology.js";
import { WhatIf } from "./whatif.js";

const OFTEN = 2000, SELDOM = 10000; // milliseconds between two looks: while a run goes on, and after its end
const ENDED = ["finished", "stopped", "failed"];
const parts = {
  topology: new Topology(body("topology")), plan: new PlanPicture(body("plan")), split: new Split(body("split")), timeline: new Timeline(body("timeline")),
  loss: new Chart(body("loss"), { what: "Loss", unit: "loss" }),
  accuracy: new Chart(body("accuracy"), { what: "Accuracy", unit: "share of correct predictions", format: percent, to: 1 }),
  speed: new Chart(body("speed"), { what: "Step time", unit: "time, means over several steps", format: seconds, from: 0, most: 80 }),
  events: new Events(body("events")), whatIf: new WhatIf(body("what-if")), actions: new Actions(body("actions")),
};
const known = { revision: -1, steps: [], ranks: {}, evaluations: [] };
let shown = "", figures = "", failures = 0;

function header(run) {
  document.title = `${run.name} – HorizonML`;
  byId("name").textContent = run.name;
  byId("state").textContent = run.state === "lost" ? "silent" : run.state;
  byId("state").className = `badge ${run.state}`;
  const bar = byId("progress");
  bar.hidden = !run.steps;
  bar.max = run.steps || 1;
  bar.value = run.step || 0;
  const epoch = run.epoch ? `, epoch ${number(run.epoch)}${run.epochs ? ` of ${number(run.epochs)}` : ""}` : "";
  // Both are predicted, so that a machine that is busy with something else changes neither more than the other.
  const alone = run.seconds_left && run.alone && run.forecast ? ` (${run.alone.device} alone: about ${seconds((run.seconds_left * run.alone.seconds) / run.forecast)})` : "";
  byId("progress-text").textContent = run.step === undefined ? run.words : `step ${number(run.step)}${run.steps ? ` of ${number(run.steps)}` : ""}${epoch}${run.seconds_left ? `, about ${seconds(run.seconds_left)} left` : ""}${alone}`;
  byId("footer").textContent = `HorizonML ${run.version ?? ""}, folder ${run.folder ?? ""}. This page loads nothing from elsewhere.`;
}

function notice(words, kind = "") {
  if (words === shown) return;
  shown = words;
  const place = byId("notice");
  place.className = `notice ${kind}`;
  place.hidden = !words;
  place.textContent = words;
}

function problems(run) {
  const found = [];
  if (["waiting", "stopped", "failed", "lost", "reading"].includes(run.state)) found.push(`${run.words[0].toUpperCase()}${run.words.slice(1)}.`);
  if (run.damaged) found.push(`${plural(run.damaged, "line")} of the records ${run.damaged === 1 ? "is" : "are"} damaged and left out; everything else is shown.`);
  if (run.problem) found.push(run.problem);
  return found.join(" ");
}

function tiles(run) {
  const against = run.forecast && run.step_seconds ? `predicted ${seconds(run.forecast)}` : null;
  const found = [["Step time", seconds(run.step_seconds), against], ["Speed", run.speed ? number(run.speed.value) : "–", run.speed ? `${run.speed.unit} per second` : null],
    ["Loss", number(run.loss), "of the last batch"], run.accuracy === null ? null : ["Accuracy", percent(run.accuracy), null],
    ["Ranks", number(run.ranks.length), plural(new Set(run.ranks.map((rank) => rank.node || rank.rank)).size, "machine")],
    run.worth?.speed_up ? ["Against one device", `${number(run.worth.speed_up)}x`, `${run.worth.is_measured ? "measured" : "predicted"}${run.worth.efficiency ? `; efficiency ${percent(run.worth.efficiency)}` : ""}`] : null,
    ["Checkpoint", run.checkpoint === null ? "–" : `step ${number(run.checkpoint)}`, null]].filter(Boolean);
  const key = JSON.stringify(found);
  if (key === figures) return;
  figures = key;
  byId("figures").replaceChildren(...found.map(([name, value, more]) => el("li", {}, el("span", {}, name), el("strong", {}, value), more ? el("small", {}, more) : null)));
}

function lobby(devices) {
  byId("lobby").hidden = !devices?.length;
  if (!devices?.length) return;
  const columns = [...new Set(devices.flatMap((device) => Object.keys(device)))];
  body("lobby").replaceChildren(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Devices" },
    table("Devices that take part when training begins", columns, devices.map((device) => columns.map((name) => `${device[name] ?? "–"}`)))));
}

function joined(old, news) {
  if (!news.length) return old;
  const first = old.findIndex((point) => point[0] >= news[0][0]);
  return [...(first < 0 ? old : old.slice(0, first)), ...news];
}

function history(found) {
  if (found.revision !== known.revision || found.since === 0) Object.assign(known, { steps: [], ranks: {}, evaluations: [] });
  known.revision = found.revision;
  known.steps = joined(known.steps, found.steps);
  for (const [rank, points] of Object.entries(found.ranks)) known.ranks[rank] = joined(known.ranks[rank] ?? [], points);
  for (const one of found.evaluations) known.evaluations = [...known.evaluations.filter((old) => old.step < one.step), one];
  const column = (index) => known.steps.map((point) => [point[0], point[index] ?? NaN]);
  const held = (name) => known.evaluations.filter((one) => one[name] !== null).map((one) => [one.step, one[name]]);
  parts.loss.set([{ name: "training", style: 0, points: column(1) }, { name: "held-out", style: 1, points: held("loss"), dots: true }]);
  const accuracy = known.steps.some((point) => point[2] !== null) || held("accuracy").length > 0;
  byId("accuracy").hidden = !accuracy;
  if (accuracy) parts.accuracy.set([{ name: "training", style: 0, points: column(2) }, { name: "held-out", style: 1, points: held("accuracy"), dots: true }]);
  const ranks = Object.entries(known.ranks).slice(0, 8).map(([rank, points]) => ({ name: `rank ${rank} computing`, style: Number(rank) % 8, points: points.map((point) => [point[0], point[1] ?? NaN]) }));
  parts.speed.set([{ name: "whole step", style: 7, points: column(3) }, ...ranks]);
}

async function look() {
  const newest = known.steps.at(-1)?.[0] ?? 0;
  const [run, past, events, timeline] = await Promise.all([get("api/run"), get(`api/history?since=${newest}&revision=${known.revision}`), get("api/events"), get(parts.timeline.path)]);
  header(run);
  lobby(run.state === "waiting" || run.state === "reading" ? run.devices : null);
  parts.actions.set(run.actions ?? []);
  if (!run.ranks) { notice(problems(run)); return run; }
  tiles(run);
  parts.topology.set(run);
  parts.plan.set(run.plan, run.layers);
  parts.split.set(run);
  parts.timeline.offer(run.has_both_timelines);
  parts.timeline.set(timeline);
  parts.events.set(events);
  parts.whatIf.set(run);
  history(past);
  notice(problems(run), run.state);
  return run;
}

async function follow() {
  let wait = OFTEN;
  try {
    const run = await look();
    failures = 0;
    if (ENDED.includes(run.state)) wait = SELDOM;
  } catch (error) {
    failures += 1;
    if (error instanceof Refused) notice(`The service refused: ${error.message}`, "lost");
    else notice("The connection to the service is lost; trying again. What is shown may be old.", "lost");
    if (!(error instanceof Refused) && !(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
    wait = Math.min(SELDOM, OFTEN * failures);
  }
  setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", follow, { once: true }) : follow()), wait);
}

follow();
