// Relays and versions: who holds what, and how many bytes it has sent.
import { get } from "./data.js";
import { bytes, chip, clean, duration, fill, h, percent, table } from "./dom.js";

export async function relays(place, _, app) {
  const body = h("div", {});
  fill(place, body);
  async function draw() {
    const [status, answer, curves] = await Promise.all([get("/v1/status"), get("/v1/relays"), get("/v1/curves")]);
    const sizes = curves.metrics.bytes_total ?? [];
    fill(body,
      h("div", { class: "card" }, h("h1", {}, "Relays"), h("p", { class: "soft" }, "Origin: ", h("code", {}, answer.origin_url), `, version ${status.newest_version}`),
        table([
          { title: "Relay", class: "name", cell: (one) => clean(one.url) },
          { title: "Version", class: "number", cell: (one) => one.newest_version },
          { title: "", cell: (one) => (one.newest_version >= status.newest_version ? chip("current") : h("span", { class: "chip warn" }, `${status.newest_version - one.newest_version} behind`)) },
          { title: "Answered", class: "number", cell: (one) => (one.success === null ? h("span", { class: "soft", title: "no client has reported yet" }, "–") : h("span", { class: one.success < 0.9 ? "chip warn" : "", title: `mean of ${one.reporters} clients` }, percent(one.success))) },
          { title: "Sent", class: "number", cell: (one) => bytes(one.bytes_sent) },
          { title: "Received", class: "number", cell: (one) => bytes(one.bytes_received) },
          { title: "Shards", class: "optional", cell: (one) => (one.exchanges ? "exchanges with others" : "follows") },
          { title: "Seen", class: "number", cell: (one) => (one.last_seen_s < 0 ? "–" : `${duration(one.last_seen_s)} ago`) },
        ], answer.relays, { empty: "No relay has announced itself." }),
        h("p", { class: "soft small" }, "Answered: the share of requests that brought the right bytes, as clients report it. Bytes sent and received are the relay's own numbers.")),
      h("div", { class: "card narrow" }, h("h2", {}, "Versions"), table([
        { title: "Version", class: "number", cell: (one) => one.version },
        { title: "Published", class: "number", cell: (one) => duration(one.at_s) },
        { title: "Bytes to follow", class: "number", cell: (one) => (one.size === null || one.size === undefined ? "–" : bytes(one.size)) },
      ], curves.steps.map((step, index) => ({ version: step + 1, at_s: curves.published_s[index], size: sizes[index] })).reverse().slice(0, 50))));
  }
  await draw();
  return { happened: (kind) => { if (kind === "version") draw().catch(() => {}); }, status: () => draw().catch(() => {}) };
}
