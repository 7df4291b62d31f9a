// Curves and facts; two runs share each chart. The address holds smoothing, axis and which other metrics are drawn.
import { chart } from "./chart.js";
import { duration, get, h, number, percent } from "./dom.js";

const known = new Map(), MOST = 48;
let drawn = "";

const tile = (label, value, note) => h("div", { class: "tile" }, h("span", {}, label), h("b", {}, value), note && h("small", {}, note));

function tiles(run, index, several) {
  const last = run.last ?? {};
  const evaluations = Object.entries(run.evaluations).map(([mode, [versions, scores]]) =>
    tile(`eval ${mode}`, number(scores.at(-1)), `was ${number(scores[0])}; now v${versions.at(-1)}`));
  return h("section", { class: `tiles run${index}` }, several && h("h2", {}, `${"AB"[index]}: ${run.name}`),
    run.broken && h("p", { class: "bad" }, run.broken),
    run.ending && h("p", { class: run.failed ? "bad" : "hint" }, run.ending),
    tile("step", number(run.step), run.total_steps ? `of ${number(run.total_steps)}${run.step < run.total_steps && run.eta_s ? `, ${duration(run.eta_s)} left` : ""}` : ""),
    tile("reward", number(last["critic/score/mean"])),
    evaluations,
    tile("lag", number(last["training/off_policy/trajectory_staleness/mean"]), `max ${number(last["training/off_policy/trajectory_staleness/max"])}, bound ${run.async_lag}`),
    tile("ESS", number(last["training/ess"])),
    tile("idle learner", percent(last["trainer/idle_ratio"])),
    tile("idle rollouts", percent(last["rollout/idle_ratio"])));
}

function evaluationLines(runs) {
  return runs.flatMap((run, r) => Object.entries(run.evaluations).map(([mode, [axis, mean]], i) => ({
    label: runs.length > 1 ? `${mode}, ${"AB"[r]}` : mode, axis, mean, colour: (i + 1) % 6, dashed: r === 1, dots: true,
  })));
}

// The same panel of each run in one chart.
function panels(runs, look) {
  return runs[0].panels.map(({ title, unit, lines }, p) => chart(title, unit, runs.flatMap((run, r) =>
    (run.panels[p]?.lines ?? []).map((line, i) => ({
      ...line, axis: run.axis, colour: i % 6, dashed: r === 1, label: runs.length > 1 ? `${line.label} ${"AB"[r]}`.trim() : line.label,
    }))), look));
}

// Every metric that a run has, by parts of its name.
async function found(runs, find) {
  const words = (find ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const all = [...new Set(runs.flatMap((run) => run.names))].sort();
  const names = words.length ? all.filter((name) => words.every((word) => name.toLowerCase().includes(word))) : [];
  const first = names.slice(0, MOST), chosen = first.length ? await Promise.all(runs.map((_, run) => get("/api/series", { run, names: first.join(",") }))) : [];
  const groups = [...new Set(all.map((name) => name.split("/")[0]))];
  return { all, names, first, chosen, groups };
}

function finder({ all, names, first, groups }, find, set) {
  const pick = (text) => h("button", { type: "button", class: "pick", onclick: () => set({ find: text }) }, text);
  const say = find ? `${names.length} of ${all.length} metrics${names.length > first.length ? `, the first ${first.length} are drawn` : ""}` : `${all.length} metrics; give parts of a name, or choose:`;
  return h("form", { class: "toolbar finder", onsubmit: (event) => { event.preventDefault(); set({ find: event.target.elements.find.value }); } },
    h("label", {}, h("b", {}, "Any metric"), h("input", { type: "search", name: "find", placeholder: "timing_s, weight_sync seconds …", value: find ?? "", onchange: (event) => set({ find: event.target.value }) })),
    h("span", { class: "hint" }, say), find ? "" : groups.map((group) => pick(`${group}/`)));
}

function toolbar({ smooth, log }, set) {
  return h("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "smooth", h("input", { type: "range", name: "smooth", min: 0, max: 0.99, step: 0.01, value: smooth, onchange: (event) => { set({ smooth: event.target.value === "0" ? "" : event.target.value }); } }),
      h("output", {}, smooth ? Number(smooth).toFixed(2) : "off")),
    h("label", {}, h("input", { type: "checkbox", name: "log", checked: log, onchange: (event) => { set({ log: event.target.checked ? "1" : "" }); } }), "log axis"));
}

function lags(runs) {
  const list = runs.map((run, r) => {
    const total = Object.values(run.lag_tokens).reduce((a, b) => a + b, 0);
    const bars = Object.entries(run.lag_tokens).map(([lag, tokens]) =>
      h("tr", {}, h("th", {}, `lag ${lag}`), h("td", {}, h("meter", { min: 0, max: 1, value: tokens / total })), h("td", {}, percent(tokens / total))));
    return h("table", { class: "bars" }, runs.length > 1 && h("caption", {}, "AB"[r]), bars);
  });
  return h("figure", { class: "chart" }, h("figcaption", {}, "Trained tokens by lag"), list);
}

export async function show(place, runs, { query, go, changed }) {
  const answers = await Promise.all(runs.map(async (_, run) => {
    const answer = await get("/api/metrics", { run, stamp: known.get(run)?.stamp });
    if (!answer.same) known.set(run, answer);
    return answer;
  }));
  const all = runs.map((_, run) => known.get(run)), asked = JSON.stringify(query);
  if (!changed && asked === drawn && answers.every((answer) => answer.same) && place.childElementCount) return all;
  drawn = asked;
  const several = all.length > 1, look = { smooth: Number(query.smooth) || 0, log: query.log === "1" };
  const set = (wish) => { document.activeElement?.blur(); go({ ...query, ...wish }); }; // a page with the focus waits for it
  const more = await found(all, query.find);
  const others = more.chosen.length ? panels(more.chosen, look) : [];
  place.replaceChildren(
    h("div", { class: several ? "both" : "" }, all.map((run, i) => tiles(run, i, several))),
    h("div", { class: "bar" }, toolbar(look, set), several ? h("p", { class: "hint" }, "A: whole lines; B: dashed lines.") : ""),
    h("div", { class: "charts" }, chart("Evaluation", "mean reward, by policy version", evaluationLines(all)), panels(all, look), lags(all)),
    finder(more, query.find, set), h("div", { class: "charts others" }, others));
  return all;
}
