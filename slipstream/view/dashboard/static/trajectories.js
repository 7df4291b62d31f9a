// The browser of trajectories: filters, orders and pages are the server's work; the address holds them all.
import { get, h, number, percent, whole } from "./dom.js";
import { COLOURS, draw, scale } from "./tokens.js";

const COUNT = 50, FIRST_TOKENS = 2000;
const COLUMNS = [["step", "step"], ["reward", "reward"], ["advantage", "advantage"], ["length", "tokens"], ["lag", "lag"], ["turns", "turns"], ["ratio", "max ratio"]];
const RANGES = [["reward", "reward"], ["length", "tokens"], ["lag", "lag"], ["turns", "turns"], ["step", "step"], ["index", "prompt"]];
const PROBLEMS = { "": "any", none: "none", cut: "cut at the limit", no_signal: "no signal (advantage 0)", drifted: "ratio above 2", masked: "sampled tokens not trained" };
const KINDS = { "": "all", trained: "trained", evaluation: "evaluation" };

const options = (choices, chosen) => Object.entries(choices).map(([value, text]) => h("option", { value, selected: value === chosen }, text));

function filters(state, change) {
  const set = (name) => (event) => change({ [name]: event.target.value, first: "", id: "" });
  const range = ([name, label]) => h("label", {}, label,
    h("input", { type: "number", step: "any", name: `${name}_min`, placeholder: "min", value: state[`${name}_min`] ?? "", onchange: set(`${name}_min`) }),
    h("input", { type: "number", step: "any", name: `${name}_max`, placeholder: "max", value: state[`${name}_max`] ?? "", onchange: set(`${name}_max`) }));
  return h("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() },
    h("label", {}, "kind", h("select", { name: "kind", onchange: set("kind") }, options(KINDS, state.kind ?? ""))),
    RANGES.map(range),
    h("label", {}, "problem", h("select", { name: "problem", onchange: set("problem") }, options(PROBLEMS, state.problem ?? ""))),
    h("button", { type: "button", onclick: () => change({ reset: true }) }, "clear"));
}

function table(page, state, change) {
  const sort = state.sort ?? "step", order = state.order ?? "desc";
  const head = ([name, label]) => h("th", { "aria-sort": sort === name ? (order === "desc" ? "descending" : "ascending") : null },
    h("button", { type: "button", onclick: () => change({ sort: name, order: sort === name && order === "desc" ? "asc" : "desc", first: "" }) }, label, sort === name ? (order === "desc" ? " ▼" : " ▲") : ""));
  const line = (row) => h("tr", { class: row.id === state.id ? "chosen" : "", tabindex: 0, "data-id": row.id,
    onclick: () => change({ id: row.id }), onkeydown: (event) => event.key === "Enter" && change({ id: row.id }) },
    COLUMNS.map(([name]) => h("td", {}, name === "ratio" && row.ratio === null ? "–" : number(row[name]))),
    h("td", { class: row.problem === "no_signal" ? "soft" : "bad" }, row.problem === "none" ? "" : row.problem.replace("_", " ")),
    h("td", { class: "text" }, row.prompt), h("td", { class: "text" }, row.text));
  return h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, COLUMNS.map(head), ["problem", "prompt", "answer"].map((text) => h("th", {}, text)))), h("tbody", {}, page.rows.map(line))));
}

function pager(page, state, change) {
  const first = Number(state.first || 0), last = Math.min(page.found, first + COUNT);
  const reading = page.files_read < page.files ? `; reading files: ${percent(page.files_read / page.files)}` : "";
  return h("p", { class: "toolbar" },
    h("button", { type: "button", disabled: first === 0, onclick: () => change({ first: String(Math.max(0, first - COUNT)) }) }, "◀ previous"),
    h("button", { type: "button", disabled: last >= page.found, onclick: () => change({ first: String(first + COUNT) }) }, "next ▶"),
    h("span", { class: "hint found" }, page.found ? `${whole(first + 1)}–${whole(last)} of ${whole(page.found)}` : "none", page.found < page.total ? ` (${whole(page.total)} in all)` : "", reading),
    page.broken && h("span", { class: "bad" }, page.broken));
}

async function detail(index, state, change) {
  if (!state.id) return h("aside", { class: "detail hint" }, "Choose a line to see its tokens.");
  const answer = await get("/api/trajectory", { run: index, id: state.id });
  const colour = state.colour in COLOURS ? state.colour : "logprob", place = h("div");
  const paint = (shown) => place.replaceChildren(draw(answer, colour, shown, () => paint(shown * 2)));
  paint(FIRST_TOKENS);
  const trained = answer.kind === "trained", samples = answer.samples.length > 1 ? answer.samples : [];
  const inLoss = trained ? answer.line.loss_mask.filter((one) => one).length : answer.length;
  const numbers = [`reward ${number(answer.reward)}`, ...(trained ? [`advantage ${number(answer.advantage)}`, `lag ${answer.lag}`] : []),
    `${answer.length} tokens${inLoss < answer.length ? `, ${inLoss} of them trained` : ""}`];
  const alike = { kind: answer.kind, index_min: answer.index, index_max: answer.index, first: "" };
  return h("aside", { class: "detail" },
    h("h3", {}, trained ? `Step ${answer.step}, trajectory ${answer.line.trajectory}, prompt ${answer.index}` : `Evaluation of version ${answer.step}, prompt ${answer.index}`),
    h("p", {}, numbers.join(" · "), answer.problem === "none" ? "" : h("span", { class: answer.problem === "no_signal" ? "soft" : "bad" }, ` · ${answer.problem.replace("_", " ")}`)),
    h("p", { class: "toolbar" },
      samples.map((id, i) => h("button", { type: "button", class: "sample", "aria-pressed": String(id === answer.id), onclick: () => change({ id }) }, `sample ${i + 1} of ${samples.length}`)),
      trained && h("button", { type: "button", class: "group", onclick: () => change({ ...alike, step_min: answer.step, step_max: answer.step }) }, "its group"),
      h("button", { type: "button", onclick: () => change({ ...alike, step_min: "", step_max: "" }) }, "this prompt over time")),
    trained && h("p", { class: "toolbar" }, h("label", {}, "colour", h("select", { name: "colour", onchange: (event) => change({ colour: event.target.value }) },
      Object.keys(COLOURS).map((name) => h("option", { value: name, selected: name === colour }, name)))), scale(colour)),
    place, h("p", { class: "hint" }, answer.file));
}

async function one(index, name, several, all, setAll) {
  const mine = several ? Object.fromEntries(Object.entries(all).filter(([key]) => key.endsWith(`.${index}`)).map(([key, value]) => [key.slice(0, -2), value])) : all;
  const change = (wish) => {
    const kept = wish.reset ? {} : { ...mine, ...wish };
    const others = several ? Object.fromEntries(Object.entries(all).filter(([key]) => !key.endsWith(`.${index}`))) : {};
    setAll({ ...others, ...Object.fromEntries(Object.entries(kept).map(([key, value]) => [several ? `${key}.${index}` : key, value])) });
  };
  const { id, colour, ...query } = mine;
  const gone = (error) => { // of a line whose file is gone: the list is there all the same
    if (error instanceof TypeError) throw error;
    return h("aside", { class: "detail bad" }, error.message);
  };
  const [page, aside] = await Promise.all([get("/api/trajectories", { ...query, count: COUNT, run: index }), detail(index, mine, change).catch(gone)]);
  const empty = !page.total && page.files_read >= page.files
    ? h("p", { class: "hint" }, "This run saved no trajectories. Set tracking.save_rollouts_every to write those of every so many steps; evaluations (evaluation.every_steps) are shown, too.") : "";
  const section = h("section", {}, several && h("h2", {}, name), filters(mine, change), empty, pager(page, mine, change), h("div", { class: "browser" }, table(page, mine, change), aside));
  return { section, busy: page.files_read < page.files };
}

export async function show(place, runs, { query, go }) {
  const focus = document.activeElement?.name;
  const drawn = await Promise.all(runs.map((run, index) => one(index, run.name, runs.length > 1, query, go)));
  const scrolled = [...place.querySelectorAll(".scroll")].map((box) => box.scrollTop);
  place.replaceChildren(h("div", { class: runs.length > 1 ? "both" : "" }, drawn.map(({ section }) => section)));
  [...place.querySelectorAll(".scroll")].forEach((box, i) => { box.scrollTop = scrolled[i] ?? 0; });
  if (focus) place.querySelector(`[name="${CSS.escape(focus)}"]`)?.focus();
  return { busy: drawn.some(({ busy }) => busy) };
}
