// What a contributor sees of a key: credit, verdicts in words, trust and what raises it, the current lease.
import { Chart } from "./charts.js";
import { get } from "./data.js";
import { chip, clean, copyable, count, duration, facts, fill, h, table } from "./dom.js";

export async function contributor(place, key) {
  const top = h("div", {}), chart = new Chart("Accepted tokens", "over the time of the run", { x: "time", lines: [{ label: "tokens", colour: "--c2" }] });
  const lists = h("div", {});
  fill(place, top, chart.element, lists);

  async function draw() {
    const view = await get(`/v1/workers/${encodeURIComponent(key)}`);
    const one = view.worker;
    fill(top, h("div", { class: "card" },
      h("h1", {}, clean(one.name, 80) || "(no name)", " ", chip(one.state)), h("p", { class: "small" }, h("code", { class: "soft" }, one.key)),
      facts([["Credit", count(one.credit_held + one.credit_released), "tokens"], ["of it held", count(one.credit_held), "as stake"],
        ["Accepted", one.submissions_accepted, "submissions"], ["Rejected", one.submissions_rejected], ["Tokens per hour", count(view.tokens_per_hour)],
        ["Last seen", one.last_seen_s < 0 ? "–" : `${duration(one.last_seen_s)} ago`]]),
      h("p", {}, view.trust), h("p", {}, h("b", {}, "What raises it: "), view.raises),
      h("p", { class: "soft small" }, "Credit is paid once per slot: where another key filled the same slot too, it is shared."),
      one.state === "banned" ? h("p", { class: "error" }, clean(one.reason, 600)) : null),
      h("div", { class: "card" }, h("h2", {}, "Now"),
        view.leases.length ? view.leases.map((lease) => h("p", {}, `Works for step ${lease.step} with version ${lease.policy_version}; `,
          lease.expires_in_s > 0 ? `${duration(lease.expires_in_s)} left.` : "its time is over.")) : h("p", { class: "soft" }, "Holds no lease."),
        one.activity && one.state !== "banned" ? h("p", { class: "soft" }, clean(one.activity)) : null));
    chart.update([view.tokens_s, view.tokens_total]);
    chart.element.hidden = view.tokens_s.length === 0;
    fill(lists,
      h("div", { class: "card" }, h("h2", {}, "Last submissions"), table([
        { title: "At", class: "number", cell: (row) => duration(row.at_s) },
        { title: "Step", class: "number", cell: (row) => row.step },
        { title: "Version", class: "number optional", cell: (row) => row.policy_version },
        { title: "Outcome", cell: (row) => chip(row.outcome) },
        { title: "In words", class: "name", cell: (row) => row.words },
        { title: "Tokens", class: "number", cell: (row) => row.tokens || "–" },
      ], view.submissions, { empty: "Nothing submitted yet." })),
      h("div", { class: "card" }, h("h2", {}, "Join this run"), copyable(view.join_command)));
  }
  await draw();
  let due = null;
  const again = () => { clearTimeout(due); due = setTimeout(() => draw().catch(() => {}), 800); };
  return { happened: (kind, fields) => { if (!fields.worker || fields.worker === key) again(); }, status: again, leave: () => clearTimeout(due) };
}
