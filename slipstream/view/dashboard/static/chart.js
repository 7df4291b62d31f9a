// Line charts as SVG: colours come from the style sheet, so light and dark need no second drawing.
import { h, number, s } from "./dom.js";

const SIZES = { small: [460, 190], large: [1000, 330] }, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 22;
const enlarged = new Set(); // titles of charts that a reader has made large

// Round marks that cover [low, high].
export function marks(low, high, wanted = 4) {
  const raw = (high - low) / wanted, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function bounds(lines) {
  const values = lines.flatMap((line) => [...line.mean, ...(line.low ?? []), ...(line.high ?? [])]).filter((v) => v !== null);
  if (!values.length) return null;
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = 0.04 * (high - low);
  return [low >= 0 && low < 0.4 * high ? 0 : low - room, high + room];
}

function logBounds(values) {
  const low = Math.log10(values.reduce((a, b) => Math.min(a, b))), high = Math.log10(values.reduce((a, b) => Math.max(a, b)));
  const room = Math.max(0.05 * (high - low), 0.02);
  return [low - room, high + room];
}

// Powers of ten, with 2 and 5 times them where there are few.
function logMarks(low, high) {
  const found = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const factor of high - low > 2 ? [1] : [1, 2, 5]) if (Math.log10(factor) + power >= low && Math.log10(factor) + power <= high) found.push(factor * 10 ** power);
  }
  return found.length > 1 ? found : marks(10 ** low, 10 ** high, 3).filter((at) => at > 0);
}

// Pieces of a path, broken where a value is missing.
function path(axis, values, x, y) {
  let text = "", pen = "M";
  for (let i = 0; i < axis.length; i++) {
    if (values[i] === null) { pen = "M"; continue; }
    text += `${pen}${x(axis[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function band(axis, low, high, x, y) {
  const known = axis.map((_, i) => i).filter((i) => low[i] !== null);
  const corner = (i, values) => `${x(axis[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  return known.length ? `M${known.map((i) => corner(i, high)).join("L")}L${known.reverse().map((i) => corner(i, low)).join("L")}Z` : "";
}

// Exponential mean of the values so far, without the pull of its beginning; as TensorBoard and wandb smooth.
export function smoothed(values, weight) {
  let sum = 0, share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return sum / share;
  });
}

// lines: [{label, axis, mean, low?, high?, colour (0..5), dashed, dots}]; smooth: 0..1; log: axis of values, where all are above 0
export function chart(title, unit, lines, { smooth = 0, log = false } = {}) {
  const given = lines.filter((line) => line.mean.some((value) => value !== null));
  const shown = given.map((line) => (smooth ? { ...line, raw: line.mean, mean: smoothed(line.mean, smooth), low: null, high: null } : line));
  const legend = h("div", { class: "legend" }), isLarge = enlarged.has(title), [WIDTH, HEIGHT] = isLarge ? SIZES.large : SIZES.small;
  const heading = h("span", {}, title), resize = () => {
    if (!enlarged.delete(title)) enlarged.add(title);
    box.replaceWith(chart(title, unit, lines, { smooth, log }));
  };
  const box = h("figure", { class: isLarge ? "chart large" : "chart" }, h("figcaption", {}, heading, unit && h("small", {}, ` ${unit}`),
    h("button", { type: "button", class: "resize", "aria-label": `${isLarge ? "shrink" : "enlarge"} ${title}`, onclick: resize }, isLarge ? "⤡" : "⤢")));
  const all = shown.flatMap((line) => [...(line.raw ?? line.mean), ...(line.low ?? [])]).filter((value) => value !== null);
  const logs = log && all.length > 0 && all.every((value) => value > 0), onto = logs ? Math.log10 : (value) => value;
  const range = logs ? logBounds(all.concat(shown.flatMap((line) => line.high ?? []).filter(Boolean))) : bounds(shown.concat(shown.filter((line) => line.raw).map((line) => ({ ...line, mean: line.raw }))));
  if (!range) return h("figure", { class: "chart empty" }, h("figcaption", {}, title), h("p", {}, "nothing measured yet"));
  const [low, high] = range, last = Math.max(1, ...shown.map((line) => line.axis.at(-1) ?? 0));
  const first = Math.min(...shown.map((line) => line.axis[0] ?? 0)), span = Math.max(1, last - first);
  const x = (at) => LEFT + ((at - first) / span) * (WIDTH - LEFT - RIGHT);
  const y = (at) => HEIGHT - BOTTOM - ((onto(at) - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const at of logs ? logMarks(low, high) : marks(low, high)) {
    picture.append(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) }));
    picture.append(s("text", { class: "mark", x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, number(at)));
  }
  for (const at of marks(first, first + span, 5).filter(Number.isInteger)) {
    picture.append(s("text", { class: "mark", x: Math.min(x(at), WIDTH - 4), y: HEIGHT - 6, "text-anchor": x(at) > WIDTH - 24 ? "end" : "middle" }, number(at)));
  }
  for (const line of shown) {
    const look = `c${line.colour}${line.dashed ? " dashed" : ""}`;
    if (line.low) picture.append(s("path", { class: `band c${line.colour}`, d: band(line.axis, line.low, line.high, x, y) }));
    if (line.raw) picture.append(s("path", { class: `line raw ${look}`, d: path(line.axis, line.raw, x, y) }));
    picture.append(s("path", { class: `line ${look}`, d: path(line.axis, line.mean, x, y) }));
    if (line.dots || line.axis.length < 3) {
      line.axis.forEach((at, i) => line.mean[i] !== null && picture.append(s("circle", { class: `dot ${look}`, cx: x(at), cy: y(line.mean[i]), r: 2.2 })));
    }
    legend.append(h("span", { class: `key ${look}` }, line.label, " ", h("b", {}, number(line.mean.findLast((value) => value !== null)))));
  }
  const cursor = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  picture.append(cursor);
  const values = [...legend.querySelectorAll("b")];
  picture.addEventListener("pointermove", (event) => {
    const frame = picture.getBoundingClientRect();
    const at = first + ((((event.clientX - frame.left) / frame.width) * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT)) * span;
    let nearest = shown[0].axis[0];
    shown.forEach((line, i) => {
      let place = 0;
      line.axis.forEach((step, j) => { if (Math.abs(step - at) < Math.abs(line.axis[place] - at)) place = j; });
      values[i].textContent = number(line.mean[place]);
      if (i === 0) nearest = line.axis[place];
    });
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(nearest));
    cursor.setAttribute("visibility", "visible");
    heading.textContent = `${title}, step ${nearest}`;
  });
  picture.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    heading.textContent = title;
    shown.forEach((line, i) => { values[i].textContent = number(line.mean.findLast((value) => value !== null)); });
  });
  box.append(picture, legend);
  return box;
}
