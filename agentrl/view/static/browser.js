// What Episodes and Groups have in common: a search, a list, and the conversation that is open beside it.

import { ask, Refused } from "./api.js";
import { Conversation } from "./conversation.js";
import { count, el } from "./dom.js";
import { List } from "./list.js";
import { address, go, state } from "./state.js";

const QUICK = ["failed", "solved", "faulted", "tool_errors", "split=test", "stop=max_turns"];
const EXAMPLE = "failed calls>3 tool=search \"no such\"   -stop=terminated  step>=10";

export class Browser {
  constructor(root, runs, { what, api, height, head }) {
    Object.assign(this, { runs, what, api });
    this.search = el("input", { type: "search", id: "search", placeholder: EXAMPLE, "aria-label": `search ${what}`, spellcheck: "false", autocomplete: "off" });
    this.search.value = state.q;
    this.search.addEventListener("input", () => {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => go({ q: this.search.value.trim() }, true), 250);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "ArrowDown") { this.search.blur(); this.list.choose(0); event.preventDefault(); }
    });
    this.wrong = el("div", { class: "wrong", role: "alert" });
    this.counted = el("span", { class: "dim", role: "status", id: "counted" });
    this.quick = el("span", { class: "quick" });
    this.list = new List({
      ask: (offset, limit) => ask(api, { run: state.run, q: state.q, sort: state.sort, offset, limit }),
      draw: (row, i) => this.draw(row, i), height, open: (row, event) => this.open(row, event), label: what,
    });
    this.pane = el("section", { class: "pane", "aria-label": "conversation" });
    this.left = el("section", { class: "left" },
      el("div", { class: "bar" }, this.search, this.counted, this.fieldsHelp()), el("div", { class: "bar small" }, this.quick), this.wrong, head, this.list.box);
    root.append(el("div", { class: "browser" }, this.left, this.pane));
    this.conversation = new Conversation(this.pane, {
      close: () => go({ id: "", token: "" }),
      next: (by) => { this.list.move(by); this.openCurrent(); },
    });
  }

  fieldsHelp() {
    return el("details", { class: "fields" }, el("summary", { title: "what can be searched for" }, "fields"), el("div", { class: "card" },
      el("p", {}, "All terms must hold; - in front of one turns it round; anything else is looked for in the conversations."),
      el("dl", {},
        [["step task sample reward advantage calls errors turns seconds slowest", "with = != < <= > >= and a number, or =none"],
          ["question answer expected", "with = or != and a part of the text: question=\"how many\""],
          ["split stop fault credit tool status failed_tool", "with = or !="],
          ["failed solved faulted tool_errors", "by themselves; failed: an infrastructure error, or the reward is in the lower half"]]
          .map(([a, b]) => [el("dt", {}, a), el("dd", {}, b)]))));
  }

  async load() {
    await this.fetch();
    if (state.id) await this.conversation.show(state.id);
    this.layout();
    this.list.find((row) => this.has(row));
    if (!/^(INPUT|A|BUTTON)$/.test(document.activeElement?.tagName)) this.list.box.focus({ preventScroll: true });
  }

  async fetch(keep = false) {
    this.drawQuick();
    try {
      const got = await this.list.reset(keep);
      this.wrong.textContent = "";
      if (got) this.tell(got);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.wrong.textContent = error.message;
    }
  }

  tell(got) {
    this.got = got;
    const progress = this.runs[Number(state.run)]?.progress ?? 1;
    this.counted.textContent = `${count(got.matched)} ${this.what}${state.q && this.api === "episodes" ? ` of ${count(got.total)}` : ""}${progress < 1 ? `, reading ${Math.round(progress * 100)} %` : ""}`;
  }

  drawQuick() {
    const has = new Set(state.q.split(/\s+/));
    this.quick.replaceChildren(...QUICK.map((term) => {
      const next = has.has(term) ? state.q.split(/\s+/).filter((t) => t !== term).join(" ") : `${state.q} ${term}`.trim();
      return el("a", { class: has.has(term) ? "chip on" : "chip", href: address({ q: next }) }, term);
    }));
  }

  layout() {
    this.left.parentNode.classList.toggle("open", Boolean(state.id));
    this.list.render();
  }

  async changed(before) {
    if (before.q !== state.q && document.activeElement !== this.search) this.search.value = state.q;
    if (before.q !== state.q || before.sort !== state.sort || before.run !== state.run) await this.fetch();
    if (before.id !== state.id || before.run !== state.run) {
      if (state.id) await this.conversation.show(state.id);
      else this.conversation.hide();
      this.layout();
    } else if (state.id) await this.conversation.changed(before);
  }

  async live(runs) {
    const before = this.runs, i = Number(state.run);
    this.runs = runs;
    if (runs[i].version === before[i].version) return;
    const top = this.list.box.scrollTop, had = this.list.matched;
    await this.fetch(top > 0);
    if (top > 0 && !state.sort) this.list.box.scrollTop = top + (this.list.matched - had) * this.list.height; // new ones are above
    if (this.list.current >= 0 && !state.sort) this.list.current += this.list.matched - had;
    this.list.render();
  }

  focusSearch() {
    this.search.focus();
    this.search.select();
  }

  key(event) {
    const { key } = event;
    if (key === "/") this.focusSearch();
    else if (key === "j" || key === "ArrowDown") this.step(1);
    else if (key === "k" || key === "ArrowUp") this.step(-1);
    else if (key === "Enter" && event.target.tagName !== "A" && event.target.tagName !== "BUTTON") this.openCurrent();
    else if (key === "Escape" && state.id) go({ id: "", token: "" });
    else return Boolean(state.id) && this.conversation.key(event);
    return true;
  }

  has(row) {
    return row.id === state.id || Boolean(row.members?.some((m) => m.id === state.id));
  }

  step(by) {
    this.list.move(by);
    if (state.id) this.openCurrent();
  }
}
