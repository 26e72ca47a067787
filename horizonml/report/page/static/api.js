// Asks the service that has served this page.

export class Refused extends Error {}

async function answer(response) {
  const text = await response.text();
  let value = null;
  try { value = JSON.parse(text); } catch { value = null; }
  if (!response.ok) throw new Refused(value?.error ?? (text.trim() || `the service answered ${response.status}`));
  return value;
}

export async function get(path, seconds = 10) {
  const headers = { "X-HorizonML": "1" };  // which no other site can add
  return answer(await fetch(path, { cache: "no-store", headers, signal: AbortSignal.timeout(1000 * seconds) }));
}

export async function act(name, token) {
  return answer(await fetch(`api/actions/${encodeURIComponent(name)}`, {
    method: "POST", cache: "no-store", headers: { Authorization: `Bearer ${token}` }, signal: AbortSignal.timeout(10000),
  }));
}
