// Elements. What others wrote becomes text nodes alone: nothing here, or anywhere, parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || (value === false && !name.startsWith("aria-"))) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// The rule of view/text.py: controls but tab and newline, what turns the direction, what has no width or no meaning.
const BLANK = "[\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u3164\\uffa0\\ufe00-\\ufe0d\\u{e0100}-\\u{e01ef}]|(?<![^\\ufe00-\\ufe0f])[\\ufe0e\\ufe0f]";
const RUNS = new RegExp(`((?![\\t\\n])[\\p{C}\\p{Zl}\\p{Zp}]|${BLANK})\\1*`, "gu");

const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");

function spelled(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return CONTROLS[code];
  if (code === 0x7f) return "DEL";
  return "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

// Text with a small label for what cannot be seen, or would move the text around it.
export function visible(text) {
  const found = document.createDocumentFragment();
  let at = 0;
  for (const match of text.matchAll(RUNS)) {
    found.append(text.slice(at, match.index));
    const count = match[0].length / match[1].length;
    const label = spelled(match[1]);
    const title = "U+" + match[1].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    found.append(el("span", { class: "ctl", title }, count > 1 ? `${label}×${count}` : label));
    at = match.index + match[0].length;
  }
  found.append(text.slice(at));
  return found;
}

export const table = (head, rows) => el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", {}, visible(h))))),
  el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((c, i) => el("td", { "data-label": i ? head[i] : null }, c))))));

export function clear(node) {
  node.replaceChildren();
  return node;
}

export const num = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return String(Number(value.toFixed(size >= 100 ? 0 : digits)));
};
export const count = (n) => n.toLocaleString("en");
export const seconds = (s) => (s === null || s === undefined ? "–" : s < 1 ? `${Math.round(s * 1000)} ms` : `${num(s, 1)} s`);
export const percent = (p) => `${Math.round(100 * p)} %`;

// Five shades from the least to the greatest reward.
export function shade(reward, low, high) {
  if (reward === null) return "r-none";
  if (high <= low) return reward > 0 ? "r4" : "r0";
  return "r" + Math.max(0, Math.min(4, Math.floor(((reward - low) / (high - low)) * 4.999)));
}
