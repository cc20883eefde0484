// The ledger: entries, how far it was checked, download.
import { get } from "./data.js";
import { clean, duration, fill, h, table } from "./dom.js";

const brief = (value) => (typeof value === "string" ? (value.length > 20 ? `${value.slice(0, 12)}…` : value)
  : Array.isArray(value) && value.length > 8 ? `${value.length}: ${value.slice(0, 3).join(", ")}, …` : JSON.stringify(value));
const words = (body) => Object.entries(body).map(([name, value]) => `${name} ${brief(value)}`).join(" · ");

export async function ledger(place) {
  const top = h("div", { class: "card" }), body = h("div", { class: "card" });
  fill(place, top, body);
  let before = null;

  async function draw() {
    const page = await get(`/v1/ledger/entries?limit=50${before === null ? "" : `&before=${before}`}`);
    const whole = page.verified_entries >= page.total;
    fill(top, h("h1", {}, "Ledger"),
      h("p", {}, page.problem ? [h("span", { class: "chip bad" }, "broken"), " ", page.problem]
        : [h("span", { class: `chip ${whole ? "good" : "quiet"}` }, whole ? "verified" : "being verified"), ` ${page.verified_entries} of ${page.total} entries: chain and signatures hold.`]),
      page.shown < page.total ? h("p", {}, `The newest ${page.total - page.shown} entries are of steps that are still open. They are public when the batches of these steps are recorded.`) : null,
      h("p", { class: "small soft" }, "Head ", h("code", {}, page.head), h("br"), "Signed by ", h("code", {}, page.coordinator_key)),
      h("p", {}, h("a", { href: "/v1/ledger", download: "ledger.jsonl" }, "Download"), " and check it yourself: ", h("code", {}, "shoal ledger verify ledger.jsonl")));
    const entries = page.entries;
    fill(body, table([
      { title: "Entry", class: "number", cell: (one) => one.seq },
      { title: "At", class: "number", cell: (one) => duration(one.at_s) },
      { title: "Kind", cell: (one) => (one.kind === "ban" || one.kind === "slash" ? h("span", { class: "chip bad" }, one.kind) : h("span", { class: "chip quiet" }, one.kind)) },
      { title: "What", class: "name small", cell: (one) => h("span", { title: clean(JSON.stringify(one.body), 2000) }, clean(words(one.body), 400)) },
      { title: "Hash", class: "optional", cell: (one) => h("code", { class: "soft" }, `${one.hash.slice(0, 12)}…`) },
    ], entries),
    h("div", { class: "tools" },
      before !== null ? h("button", { class: "plain", type: "button", onclick: () => { before = null; draw(); } }, "Newest") : null,
      entries.length && entries.at(-1).seq > 0 ? h("button", { class: "plain", type: "button", onclick: () => { before = entries.at(-1).seq; draw(); } }, "Earlier") : null));
    if (!whole && !page.problem) setTimeout(() => { if (top.isConnected && before === null) draw().catch(() => {}); }, 1000);
  }
  await draw();
  return { happened: () => { if (before === null) draw().catch(() => {}); } };
}
