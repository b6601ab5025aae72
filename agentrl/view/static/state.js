// What is looked at, kept in the address, so that a link to it can be shared.

const DEFAULTS = { view: "", run: "0", q: "", sort: "", id: "", mode: "messages", color: "author", token: "", panels: "", smooth: "0", hidden: "", only: "", at: "", steps: "10" };
const listeners = [];
if (location.search) history.replaceState(null, "", location.pathname + location.hash); // a cookie has the token now
export let state = read();

function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { ...DEFAULTS, ...Object.fromEntries(new URLSearchParams(query || "")), view: path };
}

export function address(changes) {
  const next = { ...state, ...changes };
  const kept = Object.entries(next).filter(([k, v]) => k !== "view" && k in DEFAULTS && String(v) !== DEFAULTS[k]);
  const query = new URLSearchParams(kept.map(([k, v]) => [k, String(v)])).toString();
  return `#/${next.view}${query ? "?" + query : ""}`;
}

// `quietly`: no new entry in the history.
export function go(changes, quietly = false) {
  const to = address(changes);
  if (to === location.hash) return;
  history[quietly ? "replaceState" : "pushState"](null, "", to);
  changed();
}

function changed() {
  const before = state;
  state = read();
  for (const listener of listeners) listener(state, before);
}

export const onchange = (listener) => listeners.push(listener);
addEventListener("popstate", changed);
