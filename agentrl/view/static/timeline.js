// A step's time: what it waited for, and who was busy meanwhile. Lanes overlap; what is waited for does not.

import { ask } from "./api.js";
import { clear, el, svg, visible } from "./dom.js";
import { state } from "./state.js";

const COLORS = { generate: 0, tools: 1, env: 2, learn: 3, reward: 4, evaluate: 6, render: 5, sync: 7, write: 7, checkpoint: 7 };
const WORDS = { generate: "generate", tools: "all tools", env: "environment", learn: "learn", sync: "weights", write: "write", evaluate: "evaluation", reward: "reward", render: "render", checkpoint: "checkpoint", idle: "idle", queue: "queue" };
const KINDS = { step: "step", evaluation: "evaluation after step", save: "checkpoint after step" };
const color = (owner) => (owner === "idle" || owner === "queue" ? "rest" : `c${owner.startsWith("tool/") ? 1 : (COLORS[owner] ?? 5)}`);
const word = (owner) => WORDS[owner] || owner.replace(/^tool\//, "tool ");
const time = (s) => `${s.toFixed(2)} s`;

export class Timeline {
  constructor() {
    this.node = el("section", { class: "card timeline", "aria-label": "a step's time", hidden: true });
    this.step = null; // the last, until one is chosen
  }

  async load() {
    const run = Number(state.run);
    if (run !== this.run) [this.run, this.step] = [run, null];
    this.draw(await ask("timeline", { run, step: this.step }));
  }

  draw(got) {
    this.node.hidden = !got.pictures.length;
    if (!got.pictures.length) return;
    const at = got.steps.indexOf(got.step);
    const to = (i, label, name) => el("button", { type: "button", "aria-label": name, disabled: got.steps[i] === undefined, onclick: () => this.show(got.steps[i]) }, label);
    const choice = el("input", { type: "range", min: 0, max: got.steps.length - 1, value: at, "aria-label": "step", onchange: () => this.show(got.steps[Number(choice.value)]) });
    clear(this.node).append(
      el("div", { class: "bar" }, el("h2", {}, "Where the time goes"), to(at - 1, "‹", "step before"), choice, to(at + 1, "›", "step after"), el("b", {}, `step ${got.step}`)),
      el("p", { class: "dim" }, "Lanes overlap: tools run while the model writes for others. At each moment a step waits for one thing."),
      ...got.pictures.map((p) => this.picture(p, got.step)));
  }

  show(step) {
    this.step = step;
    return this.load();
  }

  picture(p, step) {
    const sums = new Map();
    for (const [a, b, owner] of p.waited) sums.set(owner, (sums.get(owner) || 0) + b - a);
    const top = [...sums].sort((a, b) => b[1] - a[1]).filter(([, s]) => s >= 0.01 * p.seconds);
    return el("figure", {}, el("figcaption", {}, `${KINDS[p.kind]} ${step}: ${time(p.seconds)}`),
      el("div", { class: "lanes" },
        this.row(el("b", {}, "waited for"), p.waited, p.seconds, ""),
        el("div", { class: "sums" }, top.map(([owner, s]) => el("span", {}, el("i", { class: `swatch ${color(owner)}` }), visible(word(owner)), ` ${Math.round((100 * s) / p.seconds)} %`))),
        p.lanes.map(([name, s, its]) => this.row(visible(word(name)), its.map(([a, b]) => [a, b, name]), p.seconds, time(s)))));
  }

  row(label, bars, wall, seconds) {
    const scale = 1000 / (wall || 1);
    return el("div", { class: "lane" }, el("span", { class: "name" }, label),
      svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img" }, bars.map(([a, b, owner]) =>
        svg("rect", { class: color(owner), x: a * scale, y: 0, width: Math.max((b - a) * scale, 0.6), height: 10 }, svg("title", {}, `${word(owner)} ${time(b - a)}, from ${time(a)}`)))),
      el("span", { class: "dim" }, seconds));
  }
}
