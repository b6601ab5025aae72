// A group's members: what each earned, and its advantage.

import { el, num, shade, visible } from "./dom.js";

// What an episode is about, in one line: the question, and beside it what was said last and what was expected.
export function about(row, { answer = true } = {}) {
  const part = (name, label, text) => (text ? el("span", { class: name, title: text }, el("small", { class: "dim" }, label), el("bdi", {}, visible(text))) : null);
  return el("span", { class: "about" }, el("bdi", { class: "question" }, visible(row.question || `task ${row.task}`)),
    answer ? part("answer", "said ", row.answer) : null, part("expected", "expected ", row.expected));
}

export function tiles(members, current) {
  const known = members.map((m) => m.reward).filter((r) => r !== null);
  const low = Math.min(0, ...known), high = Math.max(...known, low + 1e-9, 1);
  return el("span", { class: "tiles" }, members.map((m) => el("button", {
    type: "button", class: `member ${m.fault ? "r-fault" : shade(m.reward, low, high)}${m.id === current ? " opened" : ""}`, "data-id": m.id,
    title: `sample ${m.sample}: reward ${num(m.reward)}, advantage ${num(m.advantage)}, ${m.fault ? "fault: " + m.fault : m.stop}`,
  }, el("b", {}, m.fault ? "!" : num(m.reward, 2)), el("small", {}, m.advantage > 0 ? "+" + num(m.advantage, 1) : num(m.advantage, 1)))));
}
