// Who did what when: a lane per process, spans where they fit, shares of time where they do not.
import { clock, duration, get, h, percent, s } from "./dom.js";

const WIDTH = 1000, ROW = 26, TOP = 0;
const views = new Map();

function lane(row, index, data, x) {
  const y = TOP + index * ROW, found = [s("rect", { class: "track", x: 0, y, width: WIDTH, height: ROW - 6 })];
  for (const [start, end, kind, label] of row.spans ?? []) {
    const left = Math.max(0, x(start)), width = Math.max(0.6, Math.min(WIDTH, x(end)) - left);
    found.push(s("rect", { class: `span ${kind}`, x: left.toFixed(2), y, width: width.toFixed(2), height: ROW - 6 },
      s("title", {}, `${row.name}: ${label}\n${duration(end - start)} from ${clock(start)}`)));
  }
  const bins = Object.entries(row.bins ?? {}), count = bins[0]?.[1].length ?? 0, height = ROW - 6;
  const floor = new Array(count).fill(0);
  for (const [kind, shares] of bins) {
    let path = "";
    shares.forEach((share, i) => {
      if (!share) return;
      const part = Math.min(share, 1 - floor[i]);
      path += `M${(i * WIDTH / count).toFixed(1)} ${(y + height * (1 - floor[i] - part)).toFixed(2)}h${(WIDTH / count + 0.1).toFixed(2)}v${(height * part).toFixed(2)}h-${(WIDTH / count + 0.1).toFixed(2)}z`;
      floor[i] += part;
    });
    found.push(s("path", { class: `span ${kind}`, d: path }));
  }
  return found;
}

function draw(data, zoom) {
  const span = Math.max(1e-6, data.end - data.start), x = (time) => ((time - data.start) / span) * WIDTH;
  const picture = s("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${data.lanes.length * ROW}`, height: data.lanes.length * ROW, preserveAspectRatio: "none", role: "img", "aria-label": "pipeline" });
  data.lanes.forEach((row, i) => picture.append(...lane(row, i, data, x)));
  const choice = s("rect", { class: "choice", y: TOP, height: data.lanes.length * ROW, width: 0 });
  picture.append(choice);
  let from = null;
  const at = (event) => {
    const frame = picture.getBoundingClientRect();
    return Math.max(0, Math.min(WIDTH, ((event.clientX - frame.left) / frame.width) * WIDTH));
  };
  const time = (place) => data.start + (place / WIDTH) * span;
  picture.addEventListener("pointerdown", (event) => { from = at(event); picture.setPointerCapture(event.pointerId); });
  picture.addEventListener("pointermove", (event) => {
    if (from === null) return;
    choice.setAttribute("x", Math.min(from, at(event)));
    choice.setAttribute("width", Math.abs(at(event) - from));
  });
  picture.addEventListener("pointerup", (event) => {
    const to = at(event), ends = [Math.min(from, to), Math.max(from, to)];
    from = null;
    if (ends[1] - ends[0] > 4) zoom(time(ends[0]), time(ends[1]));
  });
  const ticks = h("div", { class: "ticks" }, [0, 0.25, 0.5, 0.75, 1].map((share) =>
    h("span", {}, `+${duration(data.start - data.whole[0] + share * span)}`)));
  const names = h("div", { class: "names" }, data.lanes.map((row) => h("span", { title: row.name }, row.name)));
  return h("div", { class: "lanes" }, names, h("div", {}, ticks, picture));
}

const key = (kind) => h("span", { class: `key block ${kind}` }, kind);

async function one(index, name, several) {
  const view = views.get(index) ?? {};
  const data = await get("/api/pipeline", { run: index, start: view.start, end: view.end });
  const length = data.whole[1] - data.whole[0], kinds = data.kinds.filter((kind) => data.lanes.some((row) => row.shares[kind]));
  const go = (start, end) => { views.set(index, start === null ? {} : { start, end }); document.dispatchEvent(new Event("refresh")); };
  const middle = (data.start + data.end) / 2, half = (data.end - data.start) / 2;
  if (!data.lanes.length) return h("section", {}, several && h("h2", {}, name), h("p", { class: "hint" }, "No step and no timeline yet."));
  const button = (label, action) => h("button", { type: "button", onclick: action }, label);
  return h("section", {}, several && h("h2", {}, name),
    h("div", { class: "toolbar" },
      button("whole run", () => go(null)),
      button("last 10 s", () => go(data.whole[1] - 10, data.whole[1])),
      button("zoom in", () => go(middle - half / 2, middle + half / 2)),
      button("zoom out", () => go(Math.max(data.whole[0], middle - 2 * half), Math.min(data.whole[1], middle + 2 * half))),
      button("◀", () => go(data.start - half, data.end - half)), button("▶", () => go(data.start + half, data.end + half)),
      h("span", { class: "hint" }, `${duration(data.end - data.start)} of ${duration(length)}; drag to zoom`)),
    draw(data, go),
    h("p", { class: "legend" }, kinds.map(key), data.traces.map((file) =>
      h("a", { class: "trace", href: `/trace?${new URLSearchParams({ run: index, name: file })}`, download: file }, `trace ${file.replace(/^steps_(\d+)_(\d+).*/, "of steps $1 to $2")} (for Perfetto)`))),
    h("div", { class: "tables" },
      h("table", {}, h("caption", {}, "Share of time in this window"),
        h("thead", {}, h("tr", {}, h("th", {}, "process"), kinds.map((kind) => h("th", {}, kind)))),
        h("tbody", {}, data.lanes.map((row) => h("tr", {}, h("th", {}, row.name),
          kinds.map((kind) => h("td", { class: kind === "wait" && row.shares[kind] > 0.3 ? "bad" : "" }, row.shares[kind] ? percent(row.shares[kind]) : "")))))),
      h("table", {}, h("caption", {}, "Longest bubbles in this window"),
        h("thead", {}, h("tr", {}, ["wait", "process", "what", "at"].map((text) => h("th", {}, text)))),
        h("tbody", {}, data.bubbles.map((bubble) => h("tr", {}, h("td", {}, duration(bubble.seconds)), h("th", {}, bubble.lane),
          h("td", {}, bubble.label), h("td", {}, h("button", { type: "button", onclick: () => go(bubble.start - bubble.seconds, bubble.start + 2 * bubble.seconds) }, `+${duration(bubble.start - data.whole[0])}`))))))));
}

export async function show(place, runs) {
  const sections = await Promise.all(runs.map((run, index) => one(index, run.name, runs.length > 1)));
  place.replaceChildren(h("div", { class: "stack" }, sections));
}
