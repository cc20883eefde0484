// Answers of the coordinator. Nothing is asked of any other host.

export class Refused extends Error {
  constructor(status, body) {
    super(body.message ?? `The coordinator answered ${status}.`);
    this.status = status;
    this.code = body.code ?? "";
    this.hint = body.hint ?? "";
  }
}

export async function get(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(answer.status, body);
  return body;
}

export async function post(path, body) {
  const answer = await fetch(path, { method: "POST", credentials: "same-origin", body: JSON.stringify(body),
    headers: { "content-type": "application/json" } });
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
}

// The owner's link carries its secret in the fragment. It becomes a cookie, and leaves the address bar and the history.
export async function openSession() {
  const found = /^#owner=([0-9a-f]{64})$/.exec(location.hash);
  if (found) {
    history.replaceState(null, "", location.pathname + location.search);
    await post("/v1/owner/session", { secret: found[1] }).catch(() => {});
  }
  return get("/v1/session");
}

export function listen(handlers, onState) {
  let source = null, timer = null, wait = 1000;
  const open = () => {
    source = new EventSource("/v1/events");
    source.onopen = () => { wait = 1000; onState(true); };
    source.onerror = () => {
      onState(false);
      if (source.readyState === EventSource.CLOSED) { clearTimeout(timer); timer = setTimeout(open, wait = Math.min(2 * wait, 30000)); }
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (message) => handle(JSON.parse(message.data)));
    }
  };
  open();
  addEventListener("pagehide", () => source?.close());
}
