// One episode: what was said, or its tokens, coloured.

import { ask } from "./api.js";
import { clear, count, el, num, seconds, visible } from "./dom.js";
import { go, state } from "./state.js";
import { Threads } from "./threads.js";
import { tiles } from "./tiles.js";
import { Tokens, COLORS } from "./tokens.js";

const ALL_MS = 8; // between pieces of a very long text, so that the page stays alive

// What a model said, its thoughts paler; in messages they stand between these marks, whatever the model's own are.
const said = (text) => text.split(/(<think>[^]*?(?:<\/think>|$))/).map((part) => (part.startsWith("<think>") ? el("span", { class: "thought" }, visible(part)) : visible(part)));

export class Conversation {
  constructor(pane, { close, next }) {
    Object.assign(this, { pane, close, next });
    this.episode = null;
  }

  hide() {
    this.episode = null;
    clear(this.pane);
  }

  async show(id) {
    const run = state.run, episode = await ask("episode", { run, id });
    if (state.id !== id || state.run !== run) return;
    this.episode = episode;
    this.body = el("div", { class: "conversation" });
    this.head = el("div", { class: "top" });
    clear(this.pane).append(this.head, this.body);
    this.draw();
  }

  changed(before) {
    if (!this.episode) return null;
    if (["mode", "color"].some((k) => before[k] !== state[k])) return this.draw();
    if (before.token !== state.token && this.tokens) return this.tokens.choose(state.token);
    return null;
  }

  draw() {
    const e = this.episode, top = clear(this.head);
    const mode = (name) => el("button", { type: "button", "aria-pressed": state.mode === name, onclick: () => go({ mode: name, token: "" }, true) }, name);
    top.append(
      el("div", { class: "bar" }, el("h2", {}, e.id), el("span", { class: "dim" }, visible(e.place.join(" · "))), el("span", { class: "grow" }),
        mode("messages"), mode("tokens"),
        el("button", { type: "button", title: "the one before (k)", onclick: () => this.next(-1) }, "↑"), el("button", { type: "button", title: "the next (j)", onclick: () => this.next(1) }, "↓"),
        el("button", { type: "button", title: "close (Esc)", "aria-label": "close", onclick: this.close }, "✕")),
      this.facts(e), e.group.length > 1 ? this.group(e) : null);
    this.tokens = null;
    if (state.mode === "tokens") {
      this.tokens = new Tokens(e, clear(this.body), top);
      return this.tokens.load();
    }
    clear(this.body).append(...(e.threads.length ? new Threads(e.threads, (m, thread) => this.message(m, thread)).nodes() : e.messages.map((m) => this.message(m))));
    return null;
  }

  facts(e) {
    const weights = new Map(e.weights.map((w) => [w.name, w.value]));
    const weighed = (r) => (r.value === null || (weights.get(r.name) ?? 1) === 1 ? "" : ` × ${num(weights.get(r.name))}`);
    const parts = e.rewards.map((r) => `${r.name} ${num(r.value)}${weighed(r)}`).join(", ");
    const times = e.timings.filter((t) => t.value >= 0.0005).map((t) => `${t.name} ${seconds(t.value)}`).join(" · ");
    return el("dl", { class: "facts" },
      el("dt", {}, "reward"), el("dd", {}, el("b", {}, num(e.reward)), parts ? [" of ", visible(parts)] : null),
      el("dt", {}, "ended"), el("dd", { class: e.fault ? "bad" : null }, el("bdi", {}, visible(e.fault ? `${e.fault}: ${(e.fault_message || "").slice(0, 1000)}` : e.stop))),
      el("dt", {}, e.not_trained ? "training" : "advantage"), el("dd", {}, e.not_trained || e.advantage_explained.replace(/^advantage /, "")),
      e.expected ? [el("dt", {}, "expected"), el("dd", {}, el("bdi", {}, visible(e.expected)))] : null,
      e.more ? [el("dt", {}, "info"), el("dd", { class: "dim" }, el("bdi", {}, visible(e.more)))] : null,
      times ? [el("dt", {}, "time"), el("dd", { class: "dim" }, times)] : null);
  }

  group(e) {
    const row = tiles(e.group, e.id);
    row.addEventListener("click", (event) => {
      const id = event.target.closest("[data-id]")?.dataset.id;
      if (id) go({ id, token: "" }, true);
    });
    return el("div", { class: "bar group-of" }, el("span", { class: "dim" }, "group"), row);
  }

  message(m, thread = null) {
    const by = m.role === "assistant" ? "model" : m.role === "tool" ? "env" : "prompt";
    const where = { message: m.number, ...(thread === null ? {} : { thread }) };
    return el("article", { class: `message by-${by}`, "data-role": m.role, "data-turn": m.turn ?? null },
      el("header", {}, el("b", {}, visible(m.role)), m.name ? el("bdi", {}, " ", visible(m.name)) : null,
        m.turn !== null && m.turn !== undefined ? el("span", { class: "dim" }, ` turn ${m.turn + 1}`) : null, this.status(m)),
      m.length ? this.text(m, where, m.role === "assistant" ? said : visible) : null,
      (m.calls || []).map((c, i) => el("div", { class: `call${c.status && c.status !== "ok" ? " failed" : ""}` },
        el("div", {}, "→ ", el("b", {}, c.name ? el("bdi", {}, visible(c.name)) : "(a call that could not be read)"), this.status(c)),
        c.why === undefined ? this.text(c.arguments, { ...where, call: i }) : this.unread(c))));
  }

  // A call that could not be read, or had no arguments: what the model wrote, and what was wrong with it.
  unread(c) {
    return [el("div", { class: "text raw" }, c.raw === undefined ? el("i", { class: "dim" }, "(its text is not known: there is no tokenizer beside the run)") : visible(c.raw)),
      el("div", { class: "bad" }, el("bdi", {}, visible(c.why)))];
  }

  status(c) {
    if (!c.status) return null;
    return el("span", { class: c.status === "ok" ? "status" : "status bad" }, visible(c.status), ` ${seconds(c.seconds)}`);
  }

  // A text; of a long one the beginning, and a way to the rest.
  text(piece, where, show = visible) {
    const box = el("div", { class: "text" }, el("div", { class: "piece" }, show(piece.text)));
    let shown = piece.text.length;
    if (shown >= piece.length) return box;
    const id = state.id, run = state.run;
    const more = async () => {
      const got = await ask("text", { run, id, ...where, from: shown });
      shown += got.text.length;
      box.insertBefore(el("div", { class: "piece" }, show(got.text)), bar);
      told.textContent = `${count(shown)} of ${count(piece.length)} characters`;
      if (shown >= piece.length || !got.text) bar.remove();
    };
    const all = async () => {
      while (bar.isConnected && this.episode?.id === id) {
        await more();
        await new Promise((done) => setTimeout(done, ALL_MS));
      }
    };
    const told = el("span", { class: "dim" }, `${count(shown)} of ${count(piece.length)} characters`);
    const bar = el("div", { class: "bar more" }, told, el("button", { type: "button", onclick: more }, "show more"), el("button", { type: "button", onclick: all }, "show all"));
    box.append(bar);
    return box;
  }

  key(event) {
    if (event.key === "t") go({ mode: state.mode === "tokens" ? "messages" : "tokens", token: "" }, true);
    else if (event.key === "c") go({ mode: "tokens", color: COLORS[(COLORS.indexOf(state.color) + 1) % COLORS.length] }, true);
    else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && this.tokens && state.token) this.tokens.step(event.key === "ArrowRight" ? 1 : -1);
    else return false;
    return true;
  }
}
