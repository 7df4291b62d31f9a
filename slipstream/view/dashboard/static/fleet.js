// Rollout servers and learner ranks, their comings and goings, and what the logs warn of.
import { clock, get, h, number, percent } from "./dom.js";

const ENDED = "the run has ended"; // as replay/timeline.py writes it
const HEADS = ["process", "state", "since", "version", "host", "pid", "groups", "tokens/s", "idle", "pause", "restarts", "quarantines"];

function peer(row) {
  const gauges = row.gauges ?? {}, state = row.connected ? row.state ?? "–" : `gone (${row.why ?? "?"})`;
  const cells = [h("span", { class: `key block ${row.connected ? row.state : "gone"}` }, state), clock(row.since), row.version === undefined || row.role === "learner" ? "–" : `v${row.version}`,
    row.host ?? "–", row.pid ?? "–", number(row.groups), number(gauges.tokens_per_s), percent(gauges.idle_ratio),
    gauges.pause_s === undefined ? "–" : `${(1000 * gauges.pause_s).toFixed(0)} ms`];
  const bad = (count) => h("td", { class: count ? "bad" : "" }, count);
  return h("tr", {}, h("th", {}, row.name), cells.map((cell) => h("td", {}, cell)), bad(row.restarts), bad(row.quarantines));
}

function what(event) {
  if (event.event === "joined") return `joined (${event.role ?? "?"}, pid ${event.pid} on ${event.host})`;
  if (event.event === "ended") return `the run has ${event.failed ? "failed" : "ended"}: ${event.why}`;
  return event.event === "lost" ? `is gone: ${event.why}` : `quarantined at version ${event.version}`;
}

async function one(index, name, several) {
  const fleet = await get("/api/fleet", { run: index });
  return h("section", {}, several && h("h2", {}, name),
    fleet.has_timeline ? "" : h("p", { class: "hint" }, "This run has no timeline.jsonl: an earlier version wrote it, or its replay has not started."),
    h("div", { class: "scroll" }, h("table", { class: "fleet" }, h("thead", {}, h("tr", {}, HEADS.map((text) => h("th", {}, text)))), h("tbody", {}, fleet.peers.map(peer)))),
    h("div", { class: "tables" },
      h("table", {}, h("caption", {}, "Events, newest first"), h("tbody", {}, fleet.events.map((event) =>
        h("tr", { class: event.event === "joined" || event.why === ENDED || event.failed === false ? "" : "bad" }, h("td", {}, clock(event.time)), h("th", {}, event.name), h("td", {}, what(event)))))),
      h("table", {}, h("caption", {}, `Warnings and errors of the logs, newest first${fleet.log.length ? "" : ": none"}`), h("tbody", {}, fleet.log.map((line) =>
        h("tr", { class: line.level === "WARNING" ? "" : "bad" }, h("td", {}, line.time.slice(11)), h("th", {}, line.name), h("td", { class: "wide" }, line.text)))))));
}

export async function show(place, runs) {
  place.replaceChildren(h("div", { class: "stack" }, await Promise.all(runs.map((run, index) => one(index, run.name, runs.length > 1)))));
}
