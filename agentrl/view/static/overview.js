// Curves of several runs over each other, and what stands out in one of them.

import { ask } from "./api.js";
import { chart } from "./chart.js";
import { clear, count, el, table, visible } from "./dom.js";
import { address, go, state } from "./state.js";
import { Timeline } from "./timeline.js";

const PANELS = [
  ["reward", ["reward", "eval/reward", "eval/greedy_reward"]],
  ["-log p of what is imitated (nats a token)", ["nll"]],
  ["how episodes end (shares)", [/^stops\//]],
  ["failed calls (share)", ["tools/failure_frequency"]],
  ["calls an episode", ["tools/call_frequency"]],
  ["zero-variance groups (share)", ["frac_reward_zero_std"]],
  ["faults (episodes)", [/^faults\//]],
  ["reward components", [/^rewards\/.*\/mean$/]],
  ["entropy", ["entropy"]],
  ["kl", ["kl"]],
  ["tokens an episode", ["completions/mean_length"]],
  ["staleness (updates)", ["staleness/mean", "staleness/max"]],
  ["seconds of a step", ["step_time", "time/generate", "time/tools", "time/learn", "time/idle"]],
  ["gradient norm", ["grad_norm"]],
];

const short = (name) => name.replace(/^(stops|faults|time)\//, "").replace(/^rewards\/(.*)\/mean$/, "$1").replace(/^eval\/greedy_(.*)$/, "held out, greedy").replace(/^eval\/reward$/, "held out");

export class Overview {
  constructor(root, runs) {
    this.runs = runs;
    this.curves = runs.map(() => ({ generation: 0, lines: 0, series: {} }));
    this.legend = el("div", { class: "runs" });
    this.found = el("section", { class: "card findings", "aria-label": "what stands out" });
    this.grid = el("div", { class: "charts" });
    this.plugins = el("div", { class: "panels" });
    this.timeline = new Timeline();
    this.smooth = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth, "aria-label": "smoothing", oninput: () => go({ smooth: this.smooth.value }, true) });
    this.picker = el("details", { class: "picker" });
    root.append(el("div", { class: "overview" }, this.legend, this.found,
      this.tuning = el("div", { class: "bar" }, el("label", {}, "smoothing ", this.smooth), this.picker), this.grid, this.timeline.node, this.plugins));
  }

  async load() {
    const found = this.fetchFindings();
    await this.fetchCurves();
    this.update();
    await Promise.all([this.timeline.load(), this.fetchPanels()]);
    await found;
  }

  async fetchCurves() {
    await Promise.all(this.runs.map(async (run, i) => {
      const had = this.curves[i];
      const got = await ask("metrics", { run: i, since: had.lines, generation: had.generation });
      if (got.since === 0) had.series = {};
      if (run.evaluates) return; // its lines are chunks of tasks, and no steps
      for (const [name, [xs, ys]] of Object.entries(got.series)) {
        const line = (had.series[name] ||= [[], []]);
        line[0].push(...xs);
        line[1].push(...ys);
      }
      had.lines = got.lines;
      had.generation = got.generation;
    }));
  }

  async fetchFindings() {
    const run = Number(state.run), found = await ask("findings", { run });
    clear(this.found).append(el("h2", {}, "What stands out", this.runs.length > 1 ? el("small", {}, ` in ${this.runs[run].name}`) : null));
    if (!found.length) this.found.append(el("p", { class: "dim" }, this.runs[run].progress < 1 ? "reading the episodes ..." : "nothing yet"));
    const list = el("ul", {});
    for (const f of found) {
      const link = f.query ? el("a", { href: address({ view: "episodes", q: f.query, sort: "", id: "" }) }, "show") : null;
      list.append(el("li", { class: f.kind }, el("bdi", {}, visible(f.text)), " ", link));
    }
    this.found.append(list);
  }

  // What plugins add: tables and curves of the run that is looked at.
  async fetchPanels() {
    const shown = await ask("panels", { run: Number(state.run) });
    clear(this.plugins).append(...shown.map((p) => p.curves
      ? el("div", { class: "charts" }, chart(p.title, p.curves.map((c, i) => ({ ...c, color: i, dash: 0 })), { smooth: Number(state.smooth) }))
      : el("section", { class: "card" }, el("h2", {}, visible(p.title)), table(p.head, p.rows.map((row) => row.map((cell) => el("bdi", { class: "said" }, visible(cell))))),
        p.more ? el("p", { class: "dim" }, `${count(p.more)} more rows`) : null)));
  }

  async live(runs) {
    const before = this.runs;
    this.runs = runs;
    if (runs.some((r, i) => r.lines !== before[i].lines)) await Promise.all([this.fetchCurves(), this.timeline.load()]);
    this.update();
    const run = Number(state.run); // while the episodes are read, only their end is worth another look
    if (runs[run].version !== before[run].version && runs[run].progress === 1) await Promise.all([this.fetchFindings(), this.fetchPanels()]);
  }

  async changed(before) {
    this.update();
    if (before.run !== state.run) await Promise.all([this.fetchFindings(), this.timeline.load(), this.fetchPanels()]);
  }

  update() {
    this.drawLegend();
    this.drawPicker();
    this.tuning.hidden = !this.names().length; // an evaluation has no curves, nor has a run before its first step
    clear(this.grid).append(...this.panels().map(([title, names]) => this.panel(title, names)).filter(Boolean));
  }

  hidden() {
    return new Set(state.hidden.split(",").filter(Boolean).map(Number));
  }

  drawLegend() {
    const hidden = this.hidden();
    clear(this.legend);
    this.runs.forEach((r, i) => {
      const toggle = () => {
        hidden.has(i) ? hidden.delete(i) : hidden.add(i);
        go({ hidden: [...hidden].join(",") }, true);
      };
      this.legend.append(el("div", { class: `run card${String(i) === state.run && this.runs.length > 1 ? " current" : ""}` },
        this.runs.length > 1 ? el("input", { type: "checkbox", "aria-label": `curves of ${r.name}`, checked: !hidden.has(i), onchange: toggle }) : null,
        el("span", { class: `swatch c${i % 8}` }),
        el("a", { href: address({ run: i }), title: r.folder }, el("bdi", {}, visible(r.name))),
        el("span", { class: "dim" }, [r.env, r.model].filter(Boolean).map(String).join(" · ")),
        el("span", {}, r.evaluates || `step ${r.step}${r.steps ? " / " + r.steps : ""}`),
        el("span", { class: "dim" }, `${count(r.episodes)} episodes${r.progress < 1 ? `, reading ${Math.round(100 * r.progress)} %` : ""}`),
        r.live ? el("span", { class: "live" }, "● live") : el("span", { class: "dim" }, !r.ended ? "stands still" : !r.evaluates && r.step && r.step < r.steps ? `stopped at step ${r.step} of ${r.steps}` : "ended"),
        r.problems.map((p) => el("div", { class: "bad" }, visible(p)))));
    });
  }

  names() {
    return [...new Set(this.curves.flatMap((c) => Object.keys(c.series)))].sort();
  }

  panels() {
    const known = this.names();
    const resolve = (n) => (n instanceof RegExp ? known.filter((k) => n.test(k)) : known.filter((k) => k === n));
    const own = state.panels.split(",").filter(Boolean).map((n) => [n, [n]]);
    return [...PANELS.map(([title, names]) => [title, names.flatMap(resolve)]), ...own];
  }

  panel(title, names) {
    const hidden = this.hidden(), many = this.runs.length > 1, lines = [], keys = [];
    const present = names.filter((n) => this.curves.some((c, i) => !hidden.has(i) && c.series[n]?.[0].length));
    this.runs.forEach((run, i) => {
      if (hidden.has(i) || run.evaluates) return;
      if (many) keys.push({ label: run.name, color: i, dash: 0 });
      present.forEach((name, j) => {
        const [xs, ys] = this.series(i, name);
        lines.push({ label: many ? `${run.name} ${short(name)}` : short(name), xs, ys, color: many ? i : j, dash: many || name.startsWith("eval/") ? j % 4 : 0, dots: name.startsWith("eval/") });
      });
    });
    if (!lines.some((l) => l.xs.length)) return null;
    if (many && present.length > 1) keys.push(...present.map((name, j) => ({ label: short(name), color: null, dash: j % 4 })));
    return chart(title, lines, { smooth: Number(state.smooth), pick: (step) => go({ view: "episodes", q: `step=${step}`, sort: "", id: "" }), keys: many ? keys : null });
  }

  // Counts and shares of what did not happen in a step are not written: they are 0.
  series(run, name) {
    const { series } = this.curves[run], [xs, ys] = series[name] || [[], []];
    if (!/^(stops|faults)\//.test(name) || !series.policy_version) return [xs, ys];
    const known = new Map(xs.map((x, i) => [x, ys[i]])), [steps] = series.policy_version;
    return [steps, steps.map((x) => known.get(x) ?? 0)];
  }

  drawPicker() {
    const chosen = new Set(state.panels.split(",").filter(Boolean));
    const names = this.names();
    if (this.picker.dataset.names === names.join() + state.panels) return;
    this.picker.dataset.names = names.join() + state.panels;
    const toggle = (name) => {
      chosen.has(name) ? chosen.delete(name) : chosen.add(name);
      go({ panels: [...chosen].join(",") }, true);
    };
    clear(this.picker).append(el("summary", {}, "more curves"), el("div", { class: "choices" },
      names.map((name) => el("label", {}, el("input", { type: "checkbox", checked: chosen.has(name), onchange: () => toggle(name) }), visible(name)))));
  }
}
