// Curves: one panel, any number of lines, drawn as SVG.

import { el, svg, clear, num } from "./dom.js";

const W = 380, H = 190, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 22;
const MOST = 600; // points of a line; more are thinned out to the least and greatest of each stretch

function ticks(low, high, about, least = 0) {
  const raw = (high - low) / about, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw && s >= least) || least;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

export function smoothed(values, amount) {
  let mean = 0, weight = 0;
  return values.map((v) => {
    mean = mean * amount + v * (1 - amount);
    weight = weight * amount + (1 - amount);
    return mean / weight;
  });
}

function thinned(xs, ys) {
  if (xs.length <= MOST) return [xs, ys];
  const size = Math.ceil(xs.length / (MOST / 2)), keep = [];
  for (let i = 0; i < xs.length; i += size) {
    let low = i, high = i;
    for (let j = i; j < Math.min(i + size, xs.length); j++) {
      if (ys[j] < ys[low]) low = j;
      if (ys[j] > ys[high]) high = j;
    }
    keep.push(...(low === high ? [low] : [Math.min(low, high), Math.max(low, high)]));
  }
  return [keep.map((i) => xs[i]), keep.map((i) => ys[i])];
}

function bounds(lines) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { xs, ys } of lines) {
    for (const x of xs) { if (x < x0) x0 = x; if (x > x1) x1 = x; }
    for (const y of ys) { if (y < y0) y0 = y; if (y > y1) y1 = y; }
  }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  if (y0 >= 0 && y0 < 0.5 * y1) y0 = 0;
  if (y0 === y1 && y0 >= 0) [y0, y1] = [0, y1 || 1];
  if (y0 === y1) { const d = Math.abs(y0) || 1; y0 -= d / 2; y1 += d / 2; }
  return { x0, x1, y0, y1: y1 + (y1 - y0) * 0.04 };
}

// `lines`: [{label, xs, ys, color: 0.., dash: 0.., dots}]; `keys`: [{label, color, dash}], the lines' own by default;
// `pick(step)` is called at a click.
export function chart(title, lines, { smooth = 0, pick = null, keys = null } = {}) {
  const shown = lines.filter((l) => l.xs.length);
  const frame = el("figure", { class: "chart", "data-panel": title });
  const legend = el("span", { class: "legend" });
  for (const k of keys || shown) if (k.label) legend.append(el("span", { class: `key ${k.color === null ? "" : "c" + (k.color % 8)} d${k.dash}` }, k.label));
  frame.append(el("figcaption", {}, el("b", {}, title), legend));
  if (!shown.length) return frame;
  const box = bounds(shown);
  const px = (x) => LEFT + ((x - box.x0) / (box.x1 - box.x0)) * (W - LEFT - RIGHT);
  const py = (y) => H - BOTTOM - ((y - box.y0) / (box.y1 - box.y0)) * (H - TOP - BOTTOM);
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title} by step` });
  for (const y of ticks(box.y0, box.y1, 4)) {
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: py(y), y2: py(y) }));
    picture.append(svg("text", { class: "tick", x: LEFT - 5, y: py(y) + 3.5, "text-anchor": "end" }, num(y)));
  }
  for (const x of ticks(box.x0, box.x1, 5, 1)) {
    picture.append(svg("text", { class: "tick", x: px(x), y: H - 7, "text-anchor": "middle" }, String(x)));
  }
  for (const l of shown) draw(picture, l, px, py, smooth);
  hover(frame, picture, shown, { px, py, box, pick });
  frame.append(picture);
  return frame;
}

function draw(picture, line, px, py, smooth) {
  const path = (ys) => {
    const [xs, kept] = thinned(line.xs, ys);
    return "M" + xs.map((x, i) => `${px(x).toFixed(1)} ${py(kept[i]).toFixed(1)}`).join("L");
  };
  const style = `line c${line.color % 8} d${line.dash}`;
  if (smooth > 0 && !line.dots) picture.append(svg("path", { class: `${style} raw`, d: path(line.ys) }));
  picture.append(svg("path", { class: style, d: path(smooth > 0 && !line.dots ? smoothed(line.ys, smooth) : line.ys) }));
  if (line.dots || line.xs.length === 1) {
    line.xs.forEach((x, i) => picture.append(svg("circle", { class: `dot c${line.color % 8}`, cx: px(x), cy: py(line.ys[i]), r: 2.6 })));
  }
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function hover(frame, picture, lines, { px, py, box, pick }) {
  const mark = svg("line", { class: "mark", y1: TOP, y2: H - BOTTOM, x1: -9, x2: -9 });
  const tip = el("div", { class: "tip", hidden: true });
  const at = (event) => {
    const where = picture.getBoundingClientRect();
    return box.x0 + (((event.clientX - where.left) / where.width) * W - LEFT) / (W - LEFT - RIGHT) * (box.x1 - box.x0);
  };
  const longest = lines.reduce((a, b) => (a.xs.length >= b.xs.length ? a : b));
  picture.append(mark);
  picture.addEventListener("pointermove", (event) => {
    const x = longest.xs[nearest(longest.xs, at(event))];
    mark.setAttribute("x1", px(x));
    mark.setAttribute("x2", px(x));
    clear(tip).append(el("b", {}, `step ${x}`));
    for (const l of lines) {
      const i = nearest(l.xs, x);
      if (l.dots ? Math.abs(l.xs[i] - x) < 1 : l.xs[i] === x) tip.append(el("span", { class: `key c${l.color % 8} d${l.dash}` }, `${l.label || ""} ${num(l.ys[i], 4)}`));
    }
    tip.hidden = false;
    tip.classList.toggle("left", px(x) > W / 2);
  });
  picture.addEventListener("pointerleave", () => { tip.hidden = true; mark.setAttribute("x1", -9); mark.setAttribute("x2", -9); });
  if (pick) {
    picture.classList.add("pick");
    picture.addEventListener("click", (event) => pick(longest.xs[nearest(longest.xs, at(event))]));
  }
  frame.append(tip);
}
