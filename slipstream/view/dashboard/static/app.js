// The frame of the page: which view, when it is drawn anew, what is wrong.
import { duration, get, h } from "./dom.js";
import { show as fleet } from "./fleet.js";
import { show as overview } from "./overview.js";
import { show as pipeline } from "./pipeline.js";
import { show as trajectories } from "./trajectories.js";

const VIEWS = { overview, pipeline, fleet, trajectories };
const POLL_MS = 2000, BUSY_MS = 1000, LIVE_S = 15; // a run that wrote within LIVE_S is drawn anew
const main = document.querySelector("main"), nav = document.querySelector("nav");
const state = document.querySelector("#state"), trouble = document.querySelector("#trouble");
const started = performance.now();
let runs = [], live = false, waiting = 0, drawing = false, again = false, shown = "";

function address() {
  const [name, query] = location.hash.slice(1).split("?");
  return { name: name in VIEWS ? name : "overview", query: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function go(query) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== undefined);
  location.hash = `${address().name}?${new URLSearchParams(kept)}`;
}

async function draw() {
  if (drawing) { again = true; return; }
  drawing = true;
  const { name, query } = address(), { hash } = location;
  try {
    const drawn = await VIEWS[name](main, runs, { query, go, changed: shown !== name });
    shown = name;
    clearTimeout(waiting);
    if (drawn?.busy) waiting = setTimeout(redraw, BUSY_MS); // an index is being built
    trouble.hidden = true;
    nav.replaceChildren(...Object.keys(VIEWS).map((view) => h("a", { href: `#${view}`, "aria-current": view === name ? "page" : null }, view)));
    Object.assign(document.body.dataset, { ready: name, at: hash });
    document.body.dataset.ms ??= String(Math.round(performance.now() - started));
  } catch (error) {
    trouble.textContent = error instanceof TypeError ? `The dashboard does not answer: is it still running? (${error.message})` : error.message;
    trouble.hidden = false;
  } finally {
    drawing = false;
  }
  if (again) { again = false; await draw(); }
}

// Not under the hands of a reader who fills in a filter.
async function redraw() {
  if (document.hidden || main.contains(document.activeElement?.closest("input, select"))) waiting = setTimeout(redraw, BUSY_MS);
  else await draw();
}

async function poll() {
  try {
    const known = await get("/api/runs"), ages = known.map((run) => run.age_s), failed = known.some((run) => run.failed);
    const youngest = Math.min(...ages.map((age) => age ?? Infinity)), was = live;
    live = youngest < LIVE_S && !known.every((run) => run.ending);
    state.textContent = live ? "live" : youngest === Infinity ? "nothing written yet" : `last written ${duration(youngest)} ago`;
    if (failed) state.textContent = `failed; ${state.textContent}`;
    state.className = failed ? "bad" : live ? "live" : "";
    if (live || was) await redraw();
  } catch (error) {
    state.textContent = "no answer";
    state.className = "bad";
  }
  setTimeout(poll, POLL_MS);
}

history.replaceState(null, "", `/${location.hash}`); // the token stays out of the history
try {
  runs = await get("/api/runs");
  if (runs.length > 1) runs.forEach((run, i) => { run.name = `${"AB"[i]}: ${run.name}`; });
} catch (error) {
  trouble.textContent = error.message;
  trouble.hidden = false;
  throw error;
}
document.title = `${runs.map((run) => run.name).join(" | ")} · slipstream`;
document.querySelector("h1").textContent = runs.length > 1 ? "slipstream: A | B" : runs[0].name;
addEventListener("hashchange", draw);
document.addEventListener("refresh", draw);
await draw();
await poll();
