// Who waits on whom: one sentence, then each process of the run: what its seconds went to, and what it is at now.

import { ask } from "./api.js";
import { clear, count, el, percent, svg, visible } from "./dom.js";
import { go, state } from "./state.js";

const AT_ONCE = 40; // processes; more on demand
const COLORS = { "the engine": 0, turns: 0, "a free slot": 5, learns: 3, "new weights": 7, writes: 5, exchanges: 6, lost: "bad", "no sign of life": "bad" };
const ITSELF = /^(learns|writes|turns|exchanges|lost|no turn|between steps|no sign of life)$/; // all else is waited for
const OTHERS = /^(the learner|rollouts|a group|an evaluation|between steps|no turn|rank \d+|other ranks)$/;
const KINDS = { learner: "", rank: "", rollouts: "rollouts", server: "server", player: "player" };
const color = (what) => (OTHERS.test(what) ? "rest" : COLORS[what] === "bad" ? "bad" : `c${COLORS[what] ?? (what.startsWith("tool") ? 1 : /\.(score|score_group)$|^rewards?$/.test(what) ? 4 : 2)}`);
const age = (s) => (s < 120 ? `${Math.round(s)} s` : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);
const some = (...nodes) => nodes.filter((n) => n !== null);
const word = (what) => (OTHERS.test(what) && !ITSELF.test(what) ? `waits for ${what}` : what);
const span = (p) => (p < 0.005 ? "< 1 %" : percent(p));

export class Processes {
  constructor(root, runs) {
    this.runs = runs;
    this.head = el("section", { class: "card", "aria-label": "who waits on whom" });
    this.body = el("section", { class: "card", "aria-label": "processes" });
    this.foot = el("section", { class: "card came", "aria-label": "who came and went", hidden: true });
    this.limit = AT_ONCE;
    root.append(el("div", { class: "processes" }, this.head, this.body, this.foot));
  }

  async load() {
    const told = await ask("processes", { run: state.run, step: state.at, steps: state.steps });
    const text = JSON.stringify(told) + state.at;
    if (text === this.before || this.body.querySelector("input:active, select:focus")) return; // somebody moves it
    this.draw(told);
    this.before = text;
  }

  draw(told) {
    const run = this.runs[Number(state.run)], now = told.now && !state.at;
    const seen = told.age ? `as it was ${age(told.age)} ago` : "";
    this.when = told.age ? "then " : "now ";
    clear(this.head).append(...some(el("h2", {}, "Who waits on whom", this.runs.length > 1 ? el("small", {}, visible(` in ${run.name}`)) : null),
      now ? el("p", { class: "sentence" }, el("bdi", {}, visible(told.now)), " ", el("small", { class: "dim" }, seen)) : null,
      told.sentence ? el("p", { class: now ? "dim" : "sentence" }, el("bdi", {}, visible(told.sentence))) : null,
      now || told.sentence ? null : el("p", { class: "dim" }, told.evaluates ? "An evaluation keeps no record of who waits on whom." : told.shown.length ? "What the learner waited for is not in this run's metrics." : "Nothing yet: the run has not ended a step.")));
    clear(this.body).append(this.bar(told),
      told.recorded || told.evaluates || !told.shown.length ? "" : el("p", { class: "dim" }, "This run has no processes.jsonl: an older version wrote it. What its learner waited for is known from its metrics."),
      el("div", { class: "rows" }, told.rows.slice(0, this.limit).map((row) => this.row(row))));
    const rest = told.rows.length - this.limit;
    if (rest > 0) this.body.append(el("div", { class: "bar more" }, el("button", { type: "button", onclick: () => this.more(told) }, `show ${count(rest)} more`)));
    this.body.hidden = !told.rows.length && told.evaluates;
    this.foot.hidden = !told.messages.length;
    clear(this.foot).append(el("h2", {}, "Who came and went"), ...told.messages.map(([step, text]) => el("p", {}, el("small", { class: "dim" }, `step ${step} `), el("bdi", {}, visible(text)))));
  }

  more(told) {
    this.limit = Infinity;
    this.draw(told);
  }

  bar(told) {
    const [first, last] = told.shown;
    if (last === undefined) return el("h2", {}, "Processes");
    const at = told.steps.indexOf(last), end = told.steps.length - 1;
    const to = (i) => go({ at: i === end ? "" : told.steps[i] }, true);
    const choice = el("input", { type: "range", min: 0, max: end, value: at, disabled: !end, "aria-label": "last step", onchange: () => to(Number(choice.value)) });
    const width = el("select", { "aria-label": "how many steps", onchange: () => go({ steps: width.value }, true) },
      ["1", "10", "100"].map((n) => el("option", { value: n, selected: n === state.steps }, n === "1" ? "1 step" : `${n} steps`)));
    const button = (i, label, name) => el("button", { type: "button", "aria-label": name, disabled: told.steps[i] === undefined, onclick: () => to(i) }, label);
    return el("div", { class: "bar" }, el("h2", {}, "What each was at"), button(at - 1, "‹", "step before"), choice, button(at + 1, "›", "step after"), width,
      el("b", {}, first === last ? `step ${last}` : `steps ${first} to ${last}`));
  }

  row(row) {
    let at = 0;
    const own = row.did.filter(([what]) => color(what) !== "rest"), did = [...own, ...row.did.filter(([what]) => color(what) === "rest")];
    const bars = did.map(([what, share]) => {
      const x = at;
      at += share;
      return svg("rect", { class: color(what), x: x * 1000, y: 0, width: share * 1000, height: 10 }, svg("title", {}, `${word(what)} ${span(share)}`));
    });
    const shares = row.did.filter(([, share]) => share >= 0.005).slice(0, 6).map(([what, share]) => el("span", {}, el("i", { class: `swatch ${color(what)}` }), el("bdi", {}, visible(word(what))), ` ${span(share)}`));
    const gone = row.there && row.there < 0.98 ? el("span", { class: "dim" }, `there ${span(row.there)} of the time`) : null;
    const groups = row.groups ? el("span", { class: "dim" }, `${count(row.groups)} group${row.groups === 1 ? "" : "s"} done`) : null;
    return el("div", { class: `process kind-${row.kind in KINDS ? row.kind : "other"}`, "data-name": row.name },
      el("div", { class: "name", title: row.name }, el("small", { class: "dim" }, KINDS[row.kind] ?? "", row.name ? " " : ""), el("bdi", {}, visible(row.kind === "learner" ? "the learner" : row.name))),
      svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": did.map(([what, share]) => `${word(what)} ${span(share)}`).join(", ") }, bars),
      el("div", { class: "sums" }, shares, gone, groups),
      row.now && !state.at ? el("div", { class: "present" }, this.present(row)) : null);
  }

  present(row) {
    const { doing, groups, oldest_group: oldest } = row.now, many = row.kind === "player" || row.kind === "rollouts";
    const one = ([what, n, s]) => [many && n && !OTHERS.test(what) && !ITSELF.test(what) ? `${count(n)} on ` : row.kind === "server" && n > 1 ? `${count(n)} ` : ITSELF.test(what) ? "" : "waits for ",
      el("bdi", { class: color(what) === "bad" ? "bad" : null }, visible(what)), s >= 1 ? `, ${n > 1 ? "oldest " : ""}${age(s)}` : ""];
    return [el("b", {}, this.when), doing.slice(0, 4).map((d, i) => [i ? "; " : "", one(d)]), doing.length > 4 ? `; ${doing.length - 4} more` : "",
      groups ? ` · ${count(groups)} group${groups === 1 ? "" : "s"} leased, ${groups === 1 ? "for" : "the oldest for"} ${age(oldest)}` : ""];
  }

  changed() {
    return this.load();
  }

  live(runs) {
    this.runs = runs;
    return this.load();
  }

  // Between two steps nothing else of a run changes.
  tick() {
    return this.runs[Number(state.run)].live ? this.load() : null;
  }
}
