// Workers: state, verdicts, rate, credit; bans with their reason. The owner also sees measurements.
import { get } from "./data.js";
import { bytes, chip, clean, count, duration, facts, figure, fill, h, percent, short, table } from "./dom.js";

const PAGE = 100;
const credit = (worker) => worker.credit_held + worker.credit_released;
const COLUMNS = [
  { title: "Worker", sort: (one) => one.name, class: "name", cell: (one) => [h("a", { href: `#/worker/${one.key}` }, clean(one.name, 60) || "(no name)"), " ", h("code", { class: "soft optional" }, short(one.key))] },
  { title: "State", sort: (one) => one.state, cell: (one) => chip(one.state) },
  { title: "Accepted", class: "number", sort: (one) => -one.submissions_accepted, cell: (one) => one.submissions_accepted },
  { title: "Rejected", class: "number", sort: (one) => -one.submissions_rejected, cell: (one) => one.submissions_rejected },
  { title: "Credit", class: "number", sort: (one) => -credit(one), cell: (one) => count(credit(one)) },
  { title: "Tokens/s", class: "number optional", sort: (one) => -one.tokens_per_s, cell: (one) => count(one.tokens_per_s) },
  { title: "Seen", class: "number optional", sort: (one) => one.last_seen_s, cell: (one) => (one.last_seen_s < 0 ? "–" : `${duration(one.last_seen_s)} ago`) },
  { title: "Doing", class: "name", cell: (one) => h("span", { class: one.state === "banned" ? "error" : "soft" }, clean(one.state === "banned" ? one.reason : one.activity, 160)) },
];

export async function workers(place, _, app) {
  let rows = [], order = 2, shown = PAGE;
  const search = h("input", { type: "search", placeholder: "Name or key", "aria-label": "Find a worker", oninput: () => draw() });
  const state = h("select", { "aria-label": "State", onchange: () => draw() }, h("option", { value: "" }, "every state"),
    ["active", "probation", "registered", "suspect", "quarantined", "gone", "banned"].map((name) => h("option", { value: name }, name)));
  const body = h("div", {}), counted = h("span", { class: "soft" });
  fill(place, h("div", { class: "card" }, h("div", { class: "tools" }, h("h1", {}, "Workers"), search, state, counted), body));

  function draw() {
    const wanted = search.value.toLowerCase();
    const found = rows.filter((one) => (!state.value || one.state === state.value) && (one.name.toLowerCase().includes(wanted) || one.key.startsWith(wanted)));
    const value = COLUMNS[order].sort;
    found.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    counted.textContent = `${found.length} of ${rows.length}`;
    const columns = COLUMNS.map((column, index) => ({ ...column, title: column.sort
      ? h("button", { type: "button", "aria-pressed": index === order, onclick: () => { order = index; draw(); } }, column.title, index === order ? " ▾" : "") : column.title }));
    fill(body, table(columns, found.slice(0, shown), { empty: "Nobody has joined yet." }),
      found.length > shown ? h("button", { class: "plain", type: "button", onclick: () => { shown += 5 * PAGE; draw(); } }, `Show more of ${found.length}`) : null);
  }

  async function load() {
    rows = (await get("/v1/workers")).workers;
    draw();
  }
  await load();
  let due = null;
  const again = () => { clearTimeout(due); due = setTimeout(() => load().catch(() => {}), 1500); };
  return { happened: again, leave: () => clearTimeout(due), status: again };
}

export async function worker(place, [key], app) {
  if (app.session.is_owner) return ownerWorker(place, key);
  const { contributor } = await import("./contributor.js");
  return contributor(place, key, app);
}

async function ownerWorker(place, key) {
  const view = await get(`/v1/owner/workers/${encodeURIComponent(key)}`);
  const one = view.worker;
  fill(place,
    h("div", { class: "card" }, h("h1", {}, clean(one.name, 80) || "(no name)", " ", chip(one.state)), h("p", {}, h("code", {}, one.key)),
      one.state === "banned" ? h("p", { class: "error" }, `Banned after ${duration(one.banned_at_s)}: `, h("span", { class: "evidence" }, clean(view.reason, 2000))) : null,
      facts([["Accepted", one.submissions_accepted], ["Rejected", one.submissions_rejected], ["Credit", count(credit(one)), `${count(one.credit_held)} held`],
        ["Audit rate", percent(view.audit_rate)], ["Clean audits", view.clean_audits], ["Anomalies", view.anomalies], ["Drift", figure(view.drift), "log-likelihood ratio"],
        ["Late or failed", percent(view.missed_share)], ["Time per slot", view.work_s ? `${figure(view.work_s)} s` : "–"], ["Tokens/s", count(one.tokens_per_s), "as it says"],
        ["Memory", one.memory_bytes ? bytes(one.memory_bytes) : "–"]]),
      h("p", {}, h("a", { href: `/worker/${one.key}` }, "What its contributor sees"))),
    h("div", { class: "card" }, h("h2", {}, "Submissions"), submissions(view.submissions)));
  return {};
}

export function submissions(rows) {
  return table([
    { title: "At", class: "number", cell: (row) => duration(row.at_s) },
    { title: "Step / slot", cell: (row) => [h("a", { href: `#/step/${row.step ?? ""}` }, `${row.step ?? "–"}`), ` / ${row.slot}`] },
    { title: "Version", class: "number", cell: (row) => row.policy_version },
    { title: "Verdict", cell: (row) => chip(row.accepted === null ? row.state : row.accepted ? "accepted" : "rejected") },
    { title: "Why", class: "name", cell: (row) => (row.accepted ? "" : [h("div", {}, row.words), h("div", { class: "soft small" }, clean([row.reasons.join(", "), row.detail].filter(Boolean).join(": "), 400))]) },
    { title: "Audited", cell: (row) => (row.audited ? `yes, at ${percent(row.audit_rate)}` : "no") },
    { title: "Largest margin", class: "number", cell: (row) => (row.audited ? figure(row.metrics.margin_max ?? 0) : "–") },
    { title: "Flips", class: "number", cell: (row) => (row.audited ? `${row.metrics.rounding_flips ?? 0} / ${row.metrics.tokens ?? 0}` : "–") },
    { title: "Seconds", class: "number optional", cell: (row) => figure(row.seconds) },
  ], rows, { empty: "Nothing submitted yet." });
}
