// The same held-out tasks before and after: what was fixed, what broke.

import { ask } from "./api.js";
import { clear, count, el, num, shade, visible } from "./dom.js";
import { address, go, state } from "./state.js";

const AT_ONCE = 200; // rows; more on demand
const WORDS = { fixed: "good", broke: "bad" };

export class HeldOut {
  constructor(root, runs) {
    this.runs = runs;
    this.root = el("div", { class: "heldout" });
    root.append(this.root);
  }

  async load() {
    this.pairs = await ask("heldout", { run: state.run });
    this.draw();
  }

  draw() {
    const p = this.pairs;
    if (!p || !p.tasks.length) {
      clear(this.root).append(el("section", { class: "card" }, el("h2", {}, "Held-out tasks, before and after"), this.nothing()));
      return;
    }
    const rows = p.tasks.filter((t) => !state.only || t.verdict === state.only);
    const chip = (verdict) => el("a", { class: `chip${state.only === verdict ? " on" : ""}`, href: address({ only: state.only === verdict ? "" : verdict }) }, `${verdict} ${count(p.counts[verdict])}`);
    const d = p.difference;
    const said = d ? `The mean reward changed by ${signed(d.mean)} (95 % interval ${signed(d.low)} to ${signed(d.high)}): ${d.low > 0 ? "it is better" : d.high < 0 ? "it is worse" : "no clear difference"}.` : "";
    this.body = el("tbody", {});
    this.more = el("div", { class: "bar more" });
    clear(this.root).append(el("section", { class: "card" },
      el("h2", {}, `Held-out tasks, step ${p.before} and step ${p.after}`), el("p", {}, said), el("div", { class: "quick" }, Object.keys(p.counts).map(chip)),
      el("table", {}, el("thead", {}, el("tr", {}, ["", "task", "before", "after"].map((h) => el("th", {}, h)))), this.body), this.more));
    this.show(rows, 0);
  }

  nothing() {
    const own = this.runs[Number(state.run)];
    if (!own.evaluates) return el("p", { class: "dim" }, "Nothing to compare yet: it takes the same tasks evaluated at two steps.");
    const others = this.runs.filter((r) => r !== own && r.evaluates).map((r) => r.folder);
    return el("p", {}, "An evaluation is of one policy, and has no before and after. Two of them are compared task by task by ", el("code", {}, visible(["agentrl compare", own.folder, ...(others.length ? others : ["OTHER"])].join(" "))), ".");
  }

  show(rows, from) {
    this.body.append(...rows.slice(from, from + AT_ONCE).map((t) => this.row(t)));
    clear(this.more);
    const next = from + AT_ONCE;
    if (next < rows.length) this.more.append(el("span", { class: "dim" }, `${count(next)} of ${count(rows.length)}`), el("button", { type: "button", onclick: () => this.show(rows, next) }, "show more"));
  }

  row(t) {
    return el("tr", { "data-task": t.task }, el("td", { class: `verdict ${WORDS[t.verdict] || "dim"}` }, t.verdict),
      el("td", { class: "said" }, el("bdi", {}, visible(t.question || `task ${t.task}`)), t.expected ? el("div", { class: "dim" }, "expected ", el("bdi", {}, visible(t.expected))) : null),
      this.side(t.before, "before"), this.side(t.after, "after"));
  }

  side(s, label) {
    return el("td", { "data-label": label }, el("a", { class: `tile ${shade(s.reward, 0, 1)}`, href: address({ view: "episodes", q: "split=test", sort: "", id: s.id }), title: "open the sampled episode" }, num(s.reward, 2)),
      s.greedy === null ? null : el("small", { class: "dim" }, ` greedy ${num(s.greedy, 2)}`), el("div", { class: "said" }, el("bdi", {}, visible(s.answer || ""))));
  }

  changed(before) {
    return before.run !== state.run ? this.load() : this.draw();
  }

  live(runs) {
    const before = this.runs;
    this.runs = runs;
    return runs[Number(state.run)].version !== before[Number(state.run)].version ? this.load() : null;
  }
}

const signed = (value) => `${value >= 0 ? "+" : "\u2212"}${Math.abs(value).toFixed(3)}`;
