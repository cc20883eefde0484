// The page: which screen is shown, the header above it, and the stream of events that keeps both up to date.
import { listen, openSession } from "./data.js";
import { chip, clean, fill, h } from "./dom.js";
import { contributor } from "./contributor.js";
import { ledger } from "./ledger.js";
import { overview } from "./overview.js";
import { group, step, steps } from "./rollouts.js";
import { timeline } from "./timeline.js";
import { worker, workers } from "./workers.js";
import { relays } from "./relays.js";

const SCREENS = [
  { name: "overview", title: "Overview", show: overview },
  { name: "steps", title: "Rollouts", show: steps, owner: true },
  { name: "step", show: step, owner: true, tab: "steps" },
  { name: "group", show: group, owner: true, tab: "steps" },
  { name: "timeline", title: "Timeline", show: timeline, owner: true },
  { name: "workers", title: "Workers", show: workers },
  { name: "worker", show: worker, tab: "workers" },
  { name: "relays", title: "Relays", show: relays },
  { name: "ledger", title: "Ledger", show: ledger },
];

const main = document.getElementById("main");
const app = { session: null, status: null, events: [], screen: null };
const own = /^\/worker\/([0-9a-f]{64})$/.exec(location.pathname)?.[1];

function header() {
  const { session, status } = app;
  document.title = status ? `${status.run_id} · step ${status.step}` : "Shoal";
  fill(document.getElementById("run"), session?.run_id ?? "");
  const state = session && !session.is_live && status?.run_state !== "finished" ? "stopped" : status?.run_state;
  if (state) document.getElementById("state").replaceWith(Object.assign(chip(state), { id: "state" }));
  document.getElementById("who").textContent = session?.is_owner ? "owner" : "";
  if (status) {
    const bar = document.getElementById("progress");
    bar.setAttribute("aria-valuemax", status.steps);
    bar.setAttribute("aria-valuenow", Math.max(0, status.newest_version));
    bar.firstElementChild.style.width = `${100 * Math.min(1, Math.max(0, status.newest_version) / status.steps)}%`;
  }
}

function tabs(current) {
  const shown = SCREENS.filter((screen) => screen.title && (!screen.owner || app.session?.is_owner));
  const alerts = app.status?.alerts?.length ?? 0;
  const links = shown.map((screen) => h("a", { href: `${own ? "/" : ""}#/${screen.name}`, "aria-current": screen.name === current ? "page" : null },
    screen.title, screen.name === "overview" && alerts ? h("span", { class: "chip warn count" }, alerts) : null));
  if (own) links.unshift(h("a", { href: location.pathname, "aria-current": "page" }, "This key"));
  fill(document.getElementById("tabs"), links);
}

async function route() {
  app.screen?.leave?.();
  const [name, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const screen = SCREENS.find((one) => one.name === name) ?? SCREENS[0];
  tabs(own ? null : screen.tab ?? screen.name);
  const place = h("div", {}, h("p", { class: "soft" }, "Loading …"));
  fill(main, place);
  try {
    if (own) app.screen = await contributor(place, own, app);
    else if (screen.owner && !app.session.is_owner) fill(place, locked());
    else app.screen = await screen.show(place, rest, app);
  } catch (error) {
    fill(place, h("div", { class: "card" }, h("p", { class: "error" }, error.message), h("p", { class: "soft" }, error.hint ?? "")));
  }
}

const locked = () => h("div", { class: "card" }, h("h1", {}, "For the run's owner"),
  h("p", {}, "Open the link that ", h("code", {}, "shoal run link"), " prints on the owner's host."));

function note(kind, text, at) {
  app.events = [...app.events, { kind, text, at }].slice(-200);
  app.screen?.event?.();
}

function sentence(kind, fields) {
  const key = fields.worker ? `${fields.worker.slice(0, 10)}…` : "";
  return {
    verdict: () => `${key} ${fields.outcome} at step ${fields.step}${fields.reasons?.length ? `: ${fields.reasons.join(", ")}` : ""}`,
    version: () => `version ${fields.version} published`,
    evaluation: () => `version ${fields.version}: held-out accuracy ${fields.accuracy.toFixed(3)}`,
    registered: () => `${key} joined`,
    ban: () => `${key} banned: ${fields.why}`,
    run_state: () => `the run is ${fields.state}`,
    alert: () => `alert ${fields.name.replaceAll("_", " ")}: ${fields.seen}`,
    alert_over: () => `alert ${fields.name.replaceAll("_", " ")} is over`,
  }[kind]?.() ?? kind;
}

const handlers = { status: (status) => {
  app.status = status;
  header();
  tabs(document.querySelector("nav [aria-current]") && !own ? currentTab() : null);
  app.screen?.status?.(status);
} };
for (const kind of ["verdict", "version", "evaluation", "registered", "ban", "run_state", "alert", "alert_over"]) {
  handlers[kind] = (fields) => { note(kind, clean(sentence(kind, fields)), fields.at); app.screen?.happened?.(kind, fields); };
}

function currentTab() {
  const name = location.hash.replace(/^#\/?/, "").split("/")[0];
  const screen = SCREENS.find((one) => one.name === name) ?? SCREENS[0];
  return screen.tab ?? screen.name;
}

async function start() {
  app.session = await openSession();
  header();
  addEventListener("hashchange", async () => {
    if (/^#owner=/.test(location.hash)) { app.session = await openSession(); header(); }
    route();
    main.focus({ preventScroll: true });
  });
  listen(handlers, (live) => {
    document.getElementById("live").textContent = !app.session.is_live ? "" : live ? "live" : "reconnecting …";
  });
  await route();
}

start().catch((error) => fill(main, h("p", { class: "error" }, `The page cannot start: ${error.message}`)));
