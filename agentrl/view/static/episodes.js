// Episodes as a table: searched, ordered, opened.

import { Browser } from "./browser.js";
import { clear, el, num, seconds, shade, visible } from "./dom.js";
import { go, state } from "./state.js";
import { about } from "./tiles.js";

// Title, what it is ordered by, and whether a narrow screen leaves it out.
const COLUMNS = [["episode", "step"], ["task", "task", "wide"], ["reward", "reward"], ["advantage", "advantage"], ["calls", "calls"], ["turns", "turns", "wide"], ["time", "seconds", "wide"], ["ended", ""]];

export class Episodes extends Browser {
  constructor(root, runs) {
    const head = el("div", { class: "head episode" });
    super(root, runs, { what: "episodes", api: "episodes", height: 50, head });
    this.head = head;
    this.drawHead();
  }

  drawHead() {
    clear(this.head).append(...COLUMNS.map(([title, name, wide]) => {
      if (!name) return el("span", {}, title);
      const down = state.sort === `-${name}`, up = state.sort === name;
      return el("button", { type: "button", class: wide, title: `order by ${title}`, onclick: () => go({ sort: down ? name : up ? "" : `-${name}` }, true) }, title + (down ? " ↓" : up ? " ↑" : ""));
    }));
  }

  async changed(before) {
    this.drawHead();
    await super.changed(before);
  }

  draw(r) {
    const split = r.split === "train" ? "" : ` ${r.split}`;
    return el("div", { class: `episode${r.id === state.id ? " opened" : ""}`, "data-id": r.id },
      el("span", { class: "id" }, `${r.step}:${r.row}`, split ? el("small", {}, split) : null),
      el("span", { class: "wide" }, r.task), el("span", {}, el("i", { class: `tile ${r.fault ? "r-fault" : shade(r.reward, 0, 1)}` }, r.fault ? "!" : num(r.reward, 2))),
      el("span", { class: r.advantage > 0 ? "up" : r.advantage < 0 ? "down" : "dim" }, num(r.advantage, 2)),
      el("span", {}, r.n_calls, r.n_errors ? el("small", { class: "bad" }, ` ${r.n_errors} failed`) : null),
      el("span", { class: "wide" }, num(r.turns)), el("span", { class: "wide" }, seconds(r.seconds)),
      el("span", { class: r.fault ? "bad" : "dim" }, visible(r.fault ? `fault: ${r.fault}` : r.stop || "")), about(r));
  }

  open(row) {
    go({ id: row.id, token: "" });
  }

  openCurrent() {
    const row = this.list.row(this.list.current);
    if (row) go({ id: row.id, token: "" }, Boolean(state.id));
  }
}
