// A group's members: what each earned, and its advantage.

import { el, num, shade } from "./dom.js";

export function tiles(members, current) {
  const known = members.map((m) => m.reward).filter((r) => r !== null);
  const low = Math.min(0, ...known), high = Math.max(...known, low + 1e-9, 1);
  return el("span", { class: "tiles" }, members.map((m) => el("button", {
    type: "button", class: `member ${m.fault ? "r-fault" : shade(m.reward, low, high)}${m.id === current ? " opened" : ""}`, "data-id": m.id,
    title: `member ${m.member}: reward ${num(m.reward)}, advantage ${num(m.advantage)}, ${m.fault ? "fault: " + m.fault : m.stop}`,
  }, el("b", {}, m.fault ? "!" : num(m.reward, 2)), el("small", {}, m.advantage > 0 ? "+" + num(m.advantage, 1) : num(m.advantage, 1)))));
}
