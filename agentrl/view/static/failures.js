// Faults, tools, waits: what went wrong, how often, how long it took.

import { ask } from "./api.js";
import { clear, count, el, num, percent, seconds, table, visible } from "./dom.js";
import { address, state } from "./state.js";

const quoted = (word) => (/^[\w.-]+$/.test(word) ? word : `"${word.replaceAll('"', "")}"`);
const find = (q, text) => el("a", { href: address({ view: "episodes", q, sort: "", id: "" }) }, text);

export class Failures {
  constructor(root, runs) {
    this.runs = runs;
    this.root = el("div", { class: "failures" });
    root.append(this.root);
  }

  async load() {
    const t = await ask("failures", { run: state.run });
    clear(this.root).append(
      this.table("Infrastructure errors", "none: no episode was lost", ["kind", "episodes", "steps", "the last one said"], t.faults.map((f) => [
        find(`fault=${quoted(f.kind)}`, visible(f.kind)), count(f.episodes), f.first === f.last ? f.first : `${f.first} – ${f.last}`, el("bdi", { class: "said" }, visible(f.message.slice(0, 500)))])),
      this.table("Tools", "no call was made", ["tool", "calls", "failed", "faults", "median", "95 %", "slowest", "fails most often with"], t.tools.map((r) => [
        r.tool === null ? el("bdi", { class: "said" }, "no such tools: ", visible(r.names.join(", "))) : find(`tool=${quoted(r.tool)}`, r.tool ? visible(r.tool) : "(calls that could not be read)"), count(r.calls),
        r.errors ? find(r.tool === null ? '"unknown tool"' : `failed_tool=${quoted(r.tool)}`, `${count(r.errors)} (${percent(r.errors / r.calls)})`) : "0",
        r.faults ? el("span", { class: "bad" }, count(r.faults)) : "0", seconds(r.p50), seconds(r.p95), seconds(r.most),
        el("bdi", { class: "said" }, r.says ? [el("span", { class: "dim" }, `${percent(r.says_share)}: `), visible(r.says.slice(0, 300))] : "")])),
      this.table("How episodes end", "nothing yet", ["stop", "episodes", "mean reward"], t.stops.map((s) => [
        find(`stop=${s.stop}`, s.stop), count(s.episodes), num(s.reward, 2)])),
      this.table("Longest waits", "no call was made", ["episode", "task", "tool", "status", "waited", "whole episode"], t.waits.map((w) => [
        el("a", { href: address({ view: "episodes", q: "calls>0", sort: "-slowest", id: w.id }) }, w.id), w.task, visible(w.tool || ""), visible(w.status), seconds(w.waited), seconds(w.seconds)])),
      this.table("Slow steps", "no step took twice as long as usual", ["step", "seconds", "usual", "generation", "tools", "environment", "learning", "weights", "idle"], t.slow_steps.map((s) => [
        find(`step=${s.step}`, s.step), seconds(s.seconds), seconds(s.usual), seconds(s.generate), seconds(s.tools), seconds(s.env), seconds(s.learn), seconds(s.sync), seconds(s.idle)])));
  }

  table(title, none, head, rows) {
    return el("section", { class: "card" }, el("h2", {}, title), rows.length ? table(head, rows) : el("p", { class: "dim" }, none));
  }

  changed(before) {
    return before.run !== state.run ? this.load() : null;
  }

  live(runs) {
    const before = this.runs;
    this.runs = runs;
    return runs[Number(state.run)].version !== before[Number(state.run)].version ? this.load() : null;
  }
}
