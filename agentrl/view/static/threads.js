// An agent's episode: its threads as a tree, in the order of time, each with what was said in it.

import { count, el, svg, visible } from "./dom.js";

const KINDS = { main: "main", "sub-agent": "sub", fork: "fork", compaction: "main", rewrite: "main", "side call": "side" };
const WORDS = {
  compaction: "goes on with a shorter history", rewrite: "goes on with its history written anew",
  fork: "another way on", "side call": "seen, not trained",
};
const goesOn = (t) => t.role === "compaction" || t.role === "rewrite";
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
const kind = (t) => `thread-${KINDS[t.role] || "sub"}`;

export class Threads {
  constructor(threads, message) {
    Object.assign(this, { threads, message });
    this.blocks = [];
    this.children = threads.map(() => []);
    this.roots = [];
    threads.forEach((t, i) => (t.parent === null ? this.roots : this.children[t.parent]).push(i));
  }

  nodes() {
    const said = this.byTime(this.roots).flatMap((i) => (this.threads[i].role === "main" ? this.flow(i) : [this.block(i)]));
    return [this.map(), ...said];
  }

  byTime(numbers) {
    return [...numbers].sort((a, b) => this.threads[a].turns[0] - this.threads[b].turns[0]);
  }

  // What was said in a thread, and in those that go on for it; others stand behind the turn that opened them.
  flow(i) {
    const t = this.threads[i], after = this.byTime(this.children[i]);
    const inside = after.filter((c) => !goesOn(this.threads[c])), last = after.filter((c) => goesOn(this.threads[c]));
    const nodes = this.opening(i, t.messages.slice(0, t.begun));
    const first = t.turns[0];
    for (const m of t.messages.slice(t.begun)) {
      nodes.push(this.message(m, i));
      if (m.turn === null || m.turn === undefined) continue;
      for (const c of inside) if ((this.threads[c].after ?? first) === m.turn) nodes.push(this.block(c));
    }
    return [...nodes, ...last.flatMap((c) => [this.divider(c), ...this.flow(c)])];
  }

  // What a thread begins with. A history that was written anew is said once more: it can be opened.
  opening(i, messages) {
    const t = this.threads[i], shown = (all) => all.map((m) => this.message(m, i));
    if (t.role !== "rewrite") return shown(messages);
    const end = messages.map((m) => m.role).lastIndexOf("assistant") + 1;
    const old = messages.slice(0, end);
    return [...(old.length ? [el("details", { class: "again" }, el("summary", {}, `${plural(old.length, "message")} of its history, as the agent sent them`), shown(old))] : []), ...shown(messages.slice(end))];
  }

  block(i) {
    const t = this.threads[i];
    const block = el("details", { class: `thread ${kind(t)}`, open: t.trained, "data-thread": i }, el("summary", {}, this.title(t)), this.flow(i));
    return (this.blocks[i] = block);
  }

  divider(i) {
    const t = this.threads[i];
    return (this.blocks[i] = el("div", { class: `goes-on ${kind(t)}`, "data-thread": i }, this.title(t)));
  }

  title(t) {
    const opened = t.parent === null || t.after === null ? "" : `behind turn ${t.after + 1} of ${this.threads[t.parent].name}`;
    return [el("b", {}, visible(t.name)), ...[WORDS[t.role], opened, this.size(t)].filter(Boolean).map((said) => el("span", { class: "dim" }, said))];
  }

  size(t) {
    return `${plural(t.turns.length, "turn")}${t.sampled === null ? "" : `, ${plural(t.sampled, "token")} sampled`}`;
  }

  // Who had which turn: a line a thread, a mark a turn.
  map() {
    const turns = Math.max(...this.threads.flatMap((t) => t.turns)) + 1;
    const depth = this.threads.map(() => 0), rows = [];
    const add = (i) => {
      const t = this.threads[i];
      depth[i] = t.parent === null ? (t.role === "main" ? 0 : 1) : depth[t.parent] + (goesOn(t) ? 0 : 1);
      rows.push(this.line(i, Math.min(depth[i], 4), turns));
      this.byTime(this.children[i]).forEach(add);
    };
    this.byTime(this.roots).forEach(add);
    return el("section", { class: "tree", "aria-label": "threads" },
      el("div", { class: "dim" }, `${plural(this.threads.length, "thread")}, ${plural(turns, "turn")}, in the order of time`), rows);
  }

  line(i, depth, turns) {
    const t = this.threads[i];
    return el("button", { type: "button", class: `thread-line ${kind(t)} in${depth}`, "data-line": i, title: `${t.name}: ${this.size(t)}`, onclick: () => this.reveal(i) },
      el("span", { class: "name" }, visible(t.name)),
      svg("svg", { viewBox: `0 0 ${turns} 1`, preserveAspectRatio: "none", role: "img" }, t.turns.map((n) => svg("rect", { x: n + 0.04, y: 0, width: 0.92, height: 1 }, svg("title", {}, `turn ${n + 1}`)))),
      el("span", { class: "dim size" }, `${t.trained ? plural(t.turns.length, "turn") : "not trained"}`));
  }

  reveal(i) {
    const block = this.blocks[i] || this.main;
    for (let node = block; node; node = node.parentElement?.closest("details")) if (node.tagName === "DETAILS") node.open = true;
    (block || document.querySelector(".tree")).scrollIntoView({ block: "start", behavior: "smooth" });
  }
}
