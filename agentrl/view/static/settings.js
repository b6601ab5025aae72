// What runs are made of: settings, those that are no defaults, what differs; and the tools that were offered.

import { ask } from "./api.js";
import { clear, el, visible } from "./dom.js";
import { address, state } from "./state.js";

const ONLY = { "": "not the default", differs: "what differs", all: "all" };

export class Settings {
  constructor(root, runs) {
    this.runs = runs;
    this.root = el("div", { class: "settings" });
    root.append(this.root);
  }

  async load() {
    [this.table, this.tools] = await Promise.all([ask("settings"), ask("tools", { run: state.run })]);
    this.draw();
  }

  draw() {
    const many = this.table.runs.length > 1;
    const kinds = Object.entries(ONLY).filter(([name]) => many || name !== "differs");
    const shown = this.table.rows.filter((r) => state.only === "all" || (state.only === "differs" ? r.differs : r.shown));
    clear(this.root).append(
      el("section", { class: "card" }, el("h2", {}, many ? "Settings of the runs" : "Settings"),
        el("div", { class: "quick" }, kinds.map(([name, title]) => el("a", { class: state.only === name ? "chip on" : "chip", href: address({ only: name }) }, title))),
        shown.length ? el("table", { class: "values" }, el("thead", {}, el("tr", {}, ["setting", ...this.table.runs.map(visible), "default"].map((h) => el("th", {}, h)))), el("tbody", {}, shown.map((r) => this.row(r))))
          : el("p", { class: "dim" }, state.only === "differs" ? "The runs have the same settings." : "The run's config.toml cannot be read.")),
      el("section", { class: "card" }, el("h2", {}, "Tools offered", many ? el("small", {}, ` in ${this.runs[Number(state.run)].name}`) : null),
        this.tools.length ? this.tools.map((list, i) => this.list(list, i)) : el("p", { class: "dim" }, "not on record")));
  }

  row(r) {
    const cell = (v, i) => {
      const value = v ?? r.default;
      if (!r.used[i]) return el("td", { "data-label": this.table.runs[i], class: "dim" }, this.runs[i].evaluates ? "does nothing" : "\u2013");
      return el("td", { "data-label": this.table.runs[i], class: value !== r.default && r.changed ? "said changed" : "said" }, value === null ? el("span", { class: "dim" }, "\u2013") : el("bdi", {}, visible(value)));
    };
    return el("tr", { class: r.differs ? "differs" : null, "data-setting": r.name }, el("td", {}, el("code", {}, visible(r.name))), r.values.map(cell),
      el("td", { class: "dim", "data-label": "default" }, r.default === null ? "\u2013" : visible(r.default)));
  }

  list(tools, number) {
    return el("div", {}, this.tools.length > 1 ? el("h3", {}, `list ${number + 1} of ${this.tools.length}`) : null,
      tools.length ? tools.map((t) => this.tool(t.function || t)) : el("p", { class: "dim" }, "no tools"));
  }

  tool(f) {
    const schema = f.parameters || {}, must = new Set(schema.required || []);
    const properties = Object.entries(schema.properties || {});
    return el("details", { class: "tool", open: this.tools.length === 1 && this.tools[0].length <= 4 }, el("summary", {}, el("b", {}, visible(String(f.name))), " ", el("span", { class: "dim" }, visible(String(f.description || "").split("\n")[0]))),
      properties.length ? el("dl", { class: "facts" }, properties.map(([name, p]) => [el("dt", {}, el("code", {}, visible(name))),
        el("dd", {}, visible(String(p.type || (p.enum ? "one of " + JSON.stringify(p.enum) : "any"))), must.has(name) ? "" : ", optional", p.description ? [": ", el("bdi", {}, visible(String(p.description)))] : null)])) : el("p", { class: "dim" }, "no arguments"));
  }

  changed(before) {
    return before.run !== state.run ? this.load() : this.draw();
  }

  live(runs) {
    const before = this.runs;
    this.runs = runs;
    return !this.tools?.length && runs[Number(state.run)].version !== before[Number(state.run)].version ? this.load() : null;
  }
}
