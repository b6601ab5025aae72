// A list of any length: only the rows that are seen are there, and pages are asked for as they come into sight.

import { clear, el } from "./dom.js";

const PAGE = 200;

export class List {
  // `ask(offset, limit)` gives {version, matched, rows}; `draw(row, index)` an element; `height` of a row in pixels.
  constructor({ ask, draw, height, open, label }) {
    Object.assign(this, { ask, draw, height, open });
    this.matched = 0;
    this.version = -1;
    this.pages = new Map();
    this.asked = new Set();
    this.current = -1;
    this.space = el("div", { class: "space" });
    this.box = el("div", { class: "list", role: "listbox", "aria-label": label, tabindex: 0 }, this.space);
    this.box.addEventListener("scroll", () => this.render(), { passive: true });
    this.size = new ResizeObserver(() => this.render());
    this.size.observe(this.box);
  }

  // Ask anew; with `keep` the place in the list stays where it was.
  async reset(keep = false) {
    this.wanted = (this.wanted || 0) + 1;
    const wanted = this.wanted, first = keep ? Math.floor(this.first() / PAGE) * PAGE : 0;
    const got = await this.ask(first, PAGE);
    if (wanted !== this.wanted) return null;
    this.pages.clear();
    this.asked.clear();
    if (!keep) { this.box.scrollTop = 0; this.current = -1; }
    this.take(got, first);
    return got;
  }

  take(got, offset) {
    this.version = got.version;
    this.matched = got.matched;
    this.space.style.setProperty("height", `${Math.max(got.matched * this.height, 1)}px`);
    this.pages.set(offset / PAGE, got.rows);
    this.asked.add(offset / PAGE);
    this.render();
  }

  first() {
    return Math.floor(this.box.scrollTop / this.height);
  }

  row(index) {
    return (this.pages.get(Math.floor(index / PAGE)) || [])[index % PAGE];
  }

  render() {
    const first = Math.max(this.first() - 4, 0);
    const last = Math.min(first + Math.ceil(this.box.clientHeight / this.height) + 8, this.matched);
    clear(this.space);
    for (let i = first; i < last; i++) {
      this.want(Math.floor(i / PAGE));
      const row = this.row(i), node = row ? this.draw(row, i) : el("div", {}, "...");
      node.classList.add("row");
      node.setAttribute("role", "option");
      node.id = `row-${i}`;
      node.setAttribute("aria-selected", i === this.current);
      node.style.setProperty("top", `${i * this.height}px`);
      node.style.setProperty("height", `${this.height}px`);
      node.addEventListener("click", (event) => { this.current = i; this.render(); if (row) this.open(row, event); });
      this.space.append(node);
    }
    this.box.setAttribute("aria-activedescendant", this.current >= 0 ? `row-${this.current}` : "");
  }

  async want(page) {
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const wanted = this.wanted, got = await this.ask(page * PAGE, PAGE);
    if (wanted !== this.wanted) return;
    if (got.version !== this.version) await this.reset(true);
    else this.take(got, page * PAGE);
  }

  // Choose the row that is meant, if it is here already.
  find(meant) {
    for (const [page, rows] of this.pages) {
      const at = rows.findIndex(meant);
      if (at >= 0) return this.choose(page * PAGE + at);
    }
    return null;
  }

  move(by) {
    this.choose(Math.max(0, Math.min(this.matched - 1, this.current + by)));
  }

  choose(index) {
    this.current = index;
    const top = index * this.height, seen = this.box.clientHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.height > this.box.scrollTop + seen) this.box.scrollTop = top + this.height - seen;
    this.render();
  }
}
