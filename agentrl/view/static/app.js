// The frame: which view is shown, keys, and a look every two seconds at what is new.

import { ask } from "./api.js";
import { clear, el } from "./dom.js";
import { Overview } from "./overview.js";
import { Episodes } from "./episodes.js";
import { Groups } from "./groups.js";
import { HeldOut } from "./heldout.js";
import { Processes } from "./processes.js";
import { Settings } from "./settings.js";
import { Failures } from "./failures.js";
import { address, go, onchange, state } from "./state.js";

const VIEWS = { "": ["Overview", Overview], episodes: ["Episodes", Episodes], groups: ["Groups", Groups], failures: ["Faults & tools", Failures], heldout: ["Held out", HeldOut], settings: ["Settings", Settings], processes: ["Who waits", Processes] };
const EVERY_MS = 2000;
const KEYS = [
  ["1 to 7", "overview, episodes, groups, faults & tools, held out, settings, who waits"],
  ["/", "search"],
  ["j k or ↓ ↑", "next and previous episode or group"],
  ["Enter", "open it"],
  ["Esc", "close it, or leave the search"],
  ["t", "messages or tokens"],
  ["c", "next colouring of the tokens"],
  ["← →", "previous and next token, once one is chosen"],
  ["?", "this list"],
];
const byId = (id) => document.getElementById(id);
let runs = [];
let view = null;

function say(text) {
  const notice = byId("notice");
  notice.hidden = !text;
  notice.textContent = text;
}

async function guarded(work) {
  try {
    await work();
    say("");
  } catch (error) {
    say(error instanceof TypeError && /fetch/i.test(error.message) ? "the server does not answer: has agentrl view ended?" : error.message);
  }
}

function frame() {
  const nav = clear(byId("nav"));
  for (const [name, [title]] of Object.entries(VIEWS)) {
    nav.append(el("a", { href: address({ view: name, id: "", ...(name ? {} : { q: "", sort: "" }) }), "aria-current": name === state.view ? "page" : null }, title));
  }
  if (runs.length > 1 && state.view) {
    const choice = el("select", { "aria-label": "run", onchange: () => go({ run: choice.value, id: "" }) },
      runs.map((r, i) => el("option", { value: i, selected: String(i) === state.run }, r.name)));
    nav.append(choice);
  }
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // a phone's is longer than the screen
  const run = runs[Number(state.run)] || runs[0];
  byId("status").textContent = run ? (runs.length === 1 ? `${run.name} · ${run.evaluates ? "evaluation" : `step ${run.step}`}${run.live ? " · live" : ""}` : `${runs.length} runs`) : "";
  document.title = run ? `${run.name} · agentrl` : "agentrl view";
}

function show() {
  const [, View] = VIEWS[state.view] || VIEWS[""];
  frame();
  view = new View(clear(byId("main")), runs);
  return guarded(() => view.load());
}

function help() {
  const keys = byId("keys");
  if (keys.open) return keys.close();
  clear(keys).append(el("h2", {}, "Keys"), el("dl", {}, KEYS.map(([key, does]) => [el("dt", {}, key), el("dd", {}, does)])),
    el("button", { type: "button", onclick: () => keys.close() }, "close"));
  keys.showModal();
}

function onkey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (byId("keys").open) return;
  const number = Object.keys(VIEWS)[Number(event.key) - 1];
  if (event.key === "?") help();
  else if (event.key === "/" && !view.focusSearch) go({ view: "episodes" });
  else if (event.key >= "1" && event.key <= "7" && number !== undefined) go({ view: number, id: "" });
  else if (!view.key || !view.key(event)) return;
  event.preventDefault();
}

function theme() {
  const kept = localStorage.getItem("theme");
  if (kept) document.documentElement.dataset.theme = kept;
  byId("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  });
}

async function look() {
  if (!document.hidden) {
    await guarded(async () => {
      const now = await ask("runs");
      const before = JSON.stringify(runs);
      if (JSON.stringify(now) === before) return view.tick?.(); // what goes on between two steps
      runs = now;
      frame();
      if (view.live) await view.live(runs);
    });
  }
  setTimeout(look, EVERY_MS);
}

onchange((now, before) => {
  if (now.view !== before.view) return show();
  frame();
  return guarded(() => view.changed(before));
});
addEventListener("keydown", onkey);
byId("help").addEventListener("click", help);
theme();
guarded(async () => {
  runs = await ask("runs");
  await show();
  document.documentElement.dataset.ready = "1";
  setTimeout(look, runs.some((r) => r.progress < 1) ? 300 : EVERY_MS);
});
