// Tokens, coloured by who wrote them, or by a number that goes with each of the model's.

import { ask } from "./api.js";
import { clear, count, el, num, visible } from "./dom.js";
import { go, state } from "./state.js";

export const COLORS = ["author", "logprob", "ratio", "advantage", "staleness"];
const APART = [1.01, 1.05, 1.25, 2]; // ratios between the shades, and one over them
const SURE = [0.99, 0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01]; // probabilities between the shades

const probability = (logprob) => Math.exp(Math.min(logprob, 0));
const sided = (value, shade) => (shade ? `${value > 0 ? "p" : "n"}${shade}` : "a0");
const shadeOf = { // class of a token of the model's
  logprob: (t) => (t.logprob === null ? "plain" : "h" + SURE.filter((p) => probability(t.logprob) < p).length),
  ratio: (t) => (t.ratio === null ? "plain" : sided(Math.log(t.ratio), APART.filter((r) => Math.abs(Math.log(t.ratio)) >= Math.log(r)).length)),
  advantage: (t, most) => (!t.advantage ? "a0" : (t.advantage > 0 ? "p" : "n") + Math.max(1, Math.min(4, Math.ceil((4 * Math.abs(t.advantage)) / most)))),
  staleness: (t) => (t.stale === null ? "plain" : "h" + Math.max(0, Math.min(8, t.stale))),
};

export class Tokens {
  constructor(episode, body, top) {
    Object.assign(this, { episode, body });
    this.all = [];
    this.nodes = [];
    this.explanation = el("div", { class: "explanation", role: "status" }, el("span", { class: "dim" }, "Click a token to see why it was, or was not, learned from."));
    const pick = (name) => el("button", { type: "button", "aria-pressed": state.color === name, onclick: () => go({ color: name }, true) }, name);
    top.append(el("div", { class: "bar colors" }, el("span", { class: "dim" }, "colour by"), COLORS.map(pick), this.legend()));
    this.box = el("div", { class: "tokens" });
    this.more = el("div", { class: "bar more" });
    body.append(this.box, this.more, this.explanation);
    this.box.addEventListener("click", (event) => {
      const number = event.target.closest("[data-n]")?.dataset.n;
      if (number !== undefined) go({ token: number }, true);
    });
    this.box.addEventListener("pointerover", (event) => {
      const node = event.target.closest("[data-n]");
      if (node && !node.title) node.title = this.title(this.all[Number(node.dataset.n)]);
    });
  }

  legend() {
    const key = (name, text) => el("span", { class: `tok ${name}` }, text);
    const kinds = {
      author: [key("by-prompt", "prompt"), key("by-model", "model"), key("by-env", "env")],
      logprob: [key("h0", "sure"), key("h2", "70–90 %"), key("h4", "30–50 %"), key("h6", "3–10 %"), key("h8", "< 1 %")],
      ratio: [key("n4", "≤ ½"), key("n2", "0.8–0.95"), key("a0", "1"), key("p2", "1.05–1.25"), key("p4", "≥ 2"), el("span", { class: "dim" }, "learner / engine")],
      advantage: [key("n4", "worse than the group"), key("a0", "0"), key("p4", "better")],
      staleness: [key("h0", "0 updates old"), key("h1", "1"), key("h4", "4"), key("h8", "8 or more")],
    };
    return el("span", { class: "scale" }, kinds[state.color] || []);
  }

  async load() {
    const chosen = Number(state.token || 0);
    do await this.page(); while (chosen >= this.all.length && this.all.length < this.total);
    if (state.token) await this.choose(state.token);
  }

  async page() {
    const e = this.episode, from = this.all.length;
    const got = await ask("tokens", { run: state.run, id: e.id, from });
    if (state.id !== e.id) return;
    this.total = got.total;
    got.ids.forEach((id, i) => this.all.push(this.token(got, i, from + i, id)));
    const most = Math.max(...e.segments.map((s) => Math.abs(s.advantage || 0)), 1e-9);
    for (const t of this.all.slice(from)) {
      if (t.first) this.box.append(el("span", { class: "who" }, visible(this.heading(t))));
      const look = state.color === "author" ? `by-${t.author}` : t.author === "model" ? shadeOf[state.color](t, most) : "off";
      const node = el("span", { class: `tok ${look}`, "data-n": t.number }, visible(t.text.replaceAll("\n", "⏎\n")));
      this.nodes[t.number] = node;
      this.box.append(node);
    }
    clear(this.more);
    if (this.all.length < got.total) this.more.append(el("span", { class: "dim" }, `${count(this.all.length)} of ${count(got.total)} tokens`), el("button", { type: "button", onclick: () => this.page() }, "show more"));
    if (got.why) this.more.append(el("span", { class: "dim" }, got.why));
  }

  token(got, i, number, id) {
    const s = this.episode.segments.find((p) => number >= p.start && number < p.start + p.length);
    const version = got.versions[i], at = this.episode.learned_at;
    return { number, id, text: got.texts[i], author: s.author, turn: s.number, thread: s.thread, advantage: s.advantage, context: s.context, first: number === s.start,
      logprob: got.logprobs[i], ratio: got.log_ratios[i] === null ? null : Math.exp(got.log_ratios[i]), gradient: got.gradients[i], version, stale: version === null || at === null ? null : at - version };
  }

  // Who wrote a run of tokens; of an agent's episode the thread that begins with it.
  heading(t) {
    if (t.author === "model") return `model, turn ${t.turn + 1}${t.advantage ? `, advantage ${num(t.advantage, 2)}` : ""}`;
    if (t.author !== "prompt") return t.author;
    const thread = this.episode.threads[t.thread];
    if (thread) return `${thread.name}: ${thread.trained ? "its prompt" : "a side call, its answer too: seen, not trained"}`;
    return t.context ? `prompt of context ${t.context}: the history, as the template writes it` : t.author;
  }

  title(t) {
    const of = t.author === "model" ? `\nlogprob ${num(t.logprob, 4)} (${num(100 * probability(t.logprob ?? 0), 2)} %)\nratio ${t.ratio === null ? "none: not trained" : num(t.ratio, 4)}${t.gradient === null ? "" : `\nthe loss falls by ${num(-t.gradient, 3)} a nat of its logprob`}\nadvantage ${num(t.advantage)}\nversion ${t.version}, staleness ${t.stale ?? "unknown"}` : "\nmasked";
    return `token ${t.number}, id ${t.id}, ${t.author}${of}`;
  }

  async choose(number) {
    this.box.querySelector(".chosen")?.classList.remove("chosen");
    if (number === "") return;
    const node = this.nodes[Number(number)];
    node?.classList.add("chosen");
    node?.scrollIntoView({ block: "nearest" });
    const said = await ask("explain", { run: state.run, id: this.episode.id, token: number });
    if (state.token === String(number)) clear(this.explanation).append(el("ul", {}, said.map((s) => el("li", {}, el("bdi", {}, visible(s))))));
  }

  step(by) {
    const next = Math.max(0, Math.min(this.all.length - 1, Number(state.token) + by));
    go({ token: next }, true);
  }
}
