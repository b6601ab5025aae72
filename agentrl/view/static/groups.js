// Groups: a task's members side by side, with what each earned and how much better than the others that was.

import { Browser } from "./browser.js";
import { el, num } from "./dom.js";
import { go, state } from "./state.js";
import { about, tiles } from "./tiles.js";

export class Groups extends Browser {
  constructor(root, runs) {
    const head = el("div", { class: "head group" }, el("span", {}, "step"), el("span", { class: "wide" }, "task"), el("span", {}, "mean"), el("span", {}, "members: reward, advantage"));
    super(root, runs, { what: "groups", api: "groups", height: 72, head });
    this.member = 0;
  }

  draw(r) {
    const known = r.members.map((m) => m.reward).filter((v) => v !== null);
    const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    return el("div", { class: "group" }, el("span", { class: "id" }, r.step, r.split === "train" ? null : el("small", {}, ` ${r.split}`)), el("span", { class: "wide" }, r.task),
      el("span", {}, num(mean, 2)), tiles(r.members, state.id), about(r.members[0], { answer: false }));
  }

  open(row, event) {
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (id) go({ id, token: "" });
  }

  openCurrent() {
    const row = this.list.row(this.list.current);
    if (row) go({ id: row.members[0].id, token: "" }, Boolean(state.id));
  }

  key(event) {
    const by = { ArrowRight: 1, l: 1, ArrowLeft: -1, h: -1 }[event.key];
    const members = this.list.row(this.list.current)?.members;
    if (!by || !members || !state.id || state.token) return super.key(event);
    const at = members.findIndex((m) => m.id === state.id);
    go({ id: members[(at + by + members.length) % members.length].id }, true);
    return true;
  }
}
