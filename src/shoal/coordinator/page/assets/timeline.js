// Leases as bars per worker, coloured by policy version; versions from publication to arrival; who was late.
import { get } from "./data.js";
import { clean, duration, fill, h, short, table } from "./dom.js";

const hue = (version) => String((version * 67 + 200) % 360);
const LANES = 200;

export async function timeline(place, _, app) {
  let window_s = 300, until = null;
  const body = h("div", {}), readout = h("p", { class: "readout", "aria-live": "polite" });
  const spans = [[60, "1 min"], [300, "5 min"], [1800, "30 min"], [7200, "2 h"], [86400, "1 day"]];
  const choose = h("select", { "aria-label": "Window", onchange: () => { window_s = Number(choose.value); draw(); } }, spans.map(([value, title]) => h("option", { value, selected: value === window_s }, title)));
  const move = (share) => () => { until = Math.max(window_s, (until ?? last) + share * window_s); draw(); };
  fill(place, h("div", { class: "card" }, h("div", { class: "tools" }, h("h1", {}, "Timeline"), choose,
    h("button", { class: "plain", type: "button", onclick: move(-0.5) }, "‹ earlier"), h("button", { class: "plain", type: "button", onclick: move(0.5) }, "later ›"),
    h("button", { class: "plain", type: "button", onclick: () => { until = null; draw(); } }, "now"),
    h("span", { class: "soft small" }, "Colour: policy version. Red frame: late. Dashed: a second key for the same slot. Hatched: came to nothing.")), readout, body));
  let last = 0;

  async function draw() {
    const view = await get(`/v1/owner/timeline?window_s=${window_s}${until === null ? "" : `&until_s=${until}`}`);
    last = view.until_s;
    const span = view.until_s - view.from_s;
    const at = (seconds) => `${(100 * Math.min(1, Math.max(0, (seconds - view.from_s) / span))).toFixed(3)}%`;
    const wide = (from, to) => `${(100 * Math.max(0, Math.min(view.until_s, to) - Math.max(view.from_s, from)) / span).toFixed(3)}%`;
    const byWorker = Map.groupBy ? Map.groupBy(view.leases, (lease) => lease.worker) : grouped(view.leases);
    const published = view.versions.filter((one) => one.published_s >= view.from_s);
    const name = (key) => clean(view.names[key] ?? "", 40) || short(key);
    fill(body,
      h("div", { class: "scroll" }, h("div", { class: "lanes" },
        h("div", { class: "lane" }, h("span", { class: "soft" }, "published"), h("div", { class: "track" }, published.map((one) =>
          h("div", { class: "mark", left: at(one.published_s), "--hue": hue(one.version) }, h("span", {}, `v${one.version}`))))),
        [...byWorker].slice(0, LANES).map(([key, leases]) => h("div", { class: "lane" }, h("a", { href: `#/worker/${key}` }, name(key)),
          track(leases, name(key), readout, (lease) => h("div", { left: at(lease.issued_s), width: wide(lease.issued_s, lease.ended_s ?? view.until_s), "--hue": hue(lease.policy_version),
            class: `lease${lease.is_late ? " late" : ""}${lease.is_backup ? " backup" : ""}${["returned", "expired", "abandoned", "void"].includes(lease.state) || lease.accepted === false ? " lost" : ""}`,
            title: sentence(lease) },
            (lease.ended_s ?? view.until_s) - lease.issued_s > 0.035 * span ? `${lease.step}/${lease.slot}` : "")))),
        h("div", { class: "lane" }, h("span", {}), h("div", { class: "track" }, [0, 0.25, 0.5, 0.75].map((share) => h("div", { class: "mark", left: `${100 * share}%`, "--hue": "210" }, h("span", {}, duration(view.from_s + share * span)))))))),
      view.leases.length ? null : h("p", { class: "soft" }, "No lease in this window."),
      byWorker.size > LANES ? h("p", { class: "soft" }, `${LANES} of ${byWorker.size} workers are shown.`) : null,
      h("h2", {}, "Late"), view.late.length ? h("p", {}, view.late.slice(0, 20).map((key, index) => [index ? ", " : "", h("a", { href: `#/worker/${key}` }, name(key))])) : h("p", { class: "soft" }, "Nobody was late in this window."),
      h("h2", {}, "Versions, from publication to arrival"), arrivals(view, name));
  }

  await draw();
  let due = null;
  return { leave: () => clearTimeout(due), happened: () => { if (until === null) { clearTimeout(due); due = setTimeout(() => draw().catch(() => {}), 1500); } } };
}

const sentence = (lease) => `step ${lease.step} slot ${lease.slot}, version ${lease.policy_version}, ${lease.state}${lease.accepted === false ? ", rejected" : ""}${lease.is_late ? ", late" : ""}${lease.is_backup ? ", second key for its slot" : ""}; ${duration(lease.issued_s)} to ${lease.ended_s === null ? "now" : duration(lease.ended_s)}`;

// A worker that works on several slots at once has its bars below each other.
function stacked(leases) {
  const ends = [];
  return leases.map((lease) => {
    let row = ends.findIndex((end) => end <= lease.issued_s);
    if (row < 0) row = ends.length;
    ends[row] = lease.ended_s ?? Infinity;
    return row;
  });
}

// The bars of one worker: with the mouse, a finger or the arrow keys each tells what it is.
function track(leases, who, readout, bar) {
  const bars = leases.map(bar);
  let chosen = -1;
  const tell = (index) => {
    bars[chosen]?.classList.remove("chosen");
    chosen = Math.min(bars.length - 1, Math.max(0, index));
    bars[chosen].classList.add("chosen");
    readout.textContent = `${who}: ${sentence(leases[chosen])}`;
  };
  bars.forEach((one, index) => ["mouseenter", "click"].forEach((kind) => one.addEventListener(kind, () => tell(index))));
  const moves = { ArrowLeft: () => chosen - 1, ArrowRight: () => chosen + 1, Home: () => 0, End: () => bars.length - 1 };
  const rows = stacked(leases);
  bars.forEach((one, index) => one.style.setProperty("--row", rows[index]));
  return h("div", { class: "track", "--rows": String(1 + Math.max(0, ...rows)), tabindex: "0", role: "group", "aria-label": `Leases of ${who}; arrow keys move`,
    onkeydown: (event) => { if (moves[event.key] && bars.length) { event.preventDefault(); tell(moves[event.key]()); } } }, bars);
}

function arrivals(view, name) {
  const after = (row, seconds) => `${(seconds - row.published_s).toFixed(1)} s`;
  return table([
    { title: "Version", cell: (row) => [h("span", { class: "swatch", "--hue": hue(row.version) }), ` ${row.version}`] },
    { title: "Published", class: "number", cell: (row) => duration(row.published_s) },
    { title: "At relays after", class: "name", cell: (row) => Object.entries(row.relays).map(([url, at]) => `${clean(url, 60)}: ${after(row, at)}`).join(", ") || "–" },
    { title: "Used by workers after", class: "name", cell: (row) => Object.entries(row.workers).sort((a, b) => a[1] - b[1]).slice(0, 12).map(([key, at]) => `${name(key)}: ${after(row, at)}`).join(", ") || "nobody yet" },
  ], view.versions.slice().reverse());
}

function grouped(leases) {
  const found = new Map();
  for (const lease of leases) found.set(lease.worker, [...(found.get(lease.worker) ?? []), lease]);
  return found;
}
