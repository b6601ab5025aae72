// What the server is asked. An answer that did not change is not sent again.

export class Refused extends Error {}

export async function ask(name, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== undefined && v !== null && v !== ""));
  const answer = await fetch(`/api/${name}?${query}`, { cache: "no-cache" });
  const body = await answer.json();
  if (!answer.ok) throw new Refused(body.error || `the server answered ${answer.status}`);
  return body;
}
