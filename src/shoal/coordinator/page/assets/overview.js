// What the run is doing: alerts, who waits, curves with intervals, ages.
import { Chart } from "./charts.js";
import { get } from "./data.js";
import { bytes, duration, facts, figure, fill, h } from "./dom.js";

const PANELS = [
  ["Reward", "mean of each batch, 95 % interval", { wide: true, lines: [
    { label: "reward", metric: "reward_mean" }, { label: "high", metric: "reward_high", hidden: true, colour: "--c1" },
    { label: "low", metric: "reward_low", hidden: true, colour: "--c1" },
    { label: "task reward", metric: "task_reward_mean", colour: "--c3" },
    { label: "all generated", metric: "generated_reward_mean", colour: "--c5" }], bands: [[2, 3, "--c1"]] }],
  ["Completion length", "tokens", { lines: [{ label: "mean", metric: "output_length_mean" }] }],
  ["Entropy", "per trained token", { lines: [{ label: "entropy", metric: "entropy", colour: "--c4" }] }],
  ["Clip fractions", "share of tokens", { lines: [{ label: "raised", metric: "clip_fraction_positive" },
    { label: "lowered", metric: "clip_fraction_negative", colour: "--c5" }] }],
  ["Trainer–behaviour divergence", "k3 / token", { lines: [{ label: "divergence", metric: "kl_behaviour", colour: "--c5" }] }],
  ["Cut and repeating completions", "share", { lines: [{ label: "cut at the limit", metric: "truncation_rate", colour: "--c3" },
    { label: "repeating", metric: "repetition_rate", colour: "--c6" }] }],
  ["Trainer's time", "seconds per step", { lines: [{ label: "waits for rollouts", metric: "time_wait_batch_s", colour: "--c5" },
    { label: "update", metric: "time_update_s", colour: "--c1" }, { label: "old log-probs", metric: "time_old_logprobs_s", colour: "--c2" },
    { label: "stage weights", metric: "time_stage_s", colour: "--c3" }] }],
  ["Gradient norm", "mean of a step", { lines: [{ label: "norm", metric: "grad_norm_mean", colour: "--c6" }] }],
];
const HELDOUT = ["Held-out accuracy", "95 % interval", { x: "version", range: [0, 1], lines: [
  { label: "accuracy", colour: "--c2", points: true }, { label: "high", hidden: true, colour: "--c2" }, { label: "low", hidden: true, colour: "--c2" }],
  bands: [[2, 3, "--c2"]] }];
const SIDES = { none: ["good", "balanced"], trainer: ["warn", "the trainer waits for rollouts"], workers: ["", "workers wait for work"],
  weights: ["warn", "workers wait for weights"], validators: ["warn", "validators are behind"], unknown: ["quiet", "not known yet"] };

const total = (counts) => Object.values(counts).reduce((sum, n) => sum + n, 0);

export async function overview(place, _, app) {
  const select = (step) => { if (app.session.is_owner) location.hash = `#/step/${step}`; };
  const top = h("div", {}), grid = h("div", { class: "grid" }), ages = h("div", { class: "card" }), events = h("ul", { class: "events" });
  const charts = PANELS.map(([title, caption, definition]) => ({ definition, chart: new Chart(title, caption, definition, select) }));
  const heldout = new Chart(...HELDOUT);
  fill(grid, charts[0].chart.element, heldout.element, charts.slice(1).map((one) => one.chart.element), ages,
    h("div", { class: "card" }, h("h2", {}, "Events"), events));
  fill(place, top, grid);

  function head(status) {
    const [tone, words] = SIDES[status.starving] ?? SIDES.unknown;
    fill(top,
      status.alerts.map((alert) => h("div", { class: "card alert", role: "alert" },
        h("b", {}, alert.name.replaceAll("_", " ")), ": ", alert.seen, h("p", { class: "soft small" }, `${alert.means} Threshold: ${figure(alert.threshold)}.`), h("p", {}, alert.advice))),
      h("div", { class: "card" }, facts([
        ["Step", `${Math.min(status.step, status.steps)} / ${status.steps}`, `version ${status.newest_version}`],
        ["Next batch", `${status.useful_groups} / ${status.groups_needed}`, "useful groups"],
        ["Workers", app.session.is_live ? status.workers_present : total(status.worker_counts),
          `${app.session.is_live ? "present; " : ""}${Object.entries(status.worker_counts).map(([name, n]) => `${n} ${name}`).join(", ")}`],
        ["To check", status.submissions_pending, "submissions"],
        ["Verdicts", `${status.verdicts.accepted ?? 0}`, `accepted, ${status.verdicts.rejected ?? 0} rejected`],
        ["Running for", duration(status.uptime_s)],
        ["Free disk", status.disk_free_bytes === null ? "–" : bytes(status.disk_free_bytes)],
      ])),
      h("div", { class: "card advice" }, h("span", { class: `chip ${tone}` }, words), h("span", {}, status.advice)));
    drawAges(status.age_histogram);
  }

  function drawAges(histogram) {
    const pairs = Object.entries(histogram);
    const largest = Math.max(1, ...pairs.map(([, n]) => n));
    fill(ages, h("h2", {}, "Age of trained groups"), h("p", { class: "soft small" }, "versions behind the trainer"),
      h("div", { class: "bars" }, pairs.map(([age, n]) => [h("span", {}, age), h("i", { width: `${(100 * n) / largest}%` }), h("span", { class: "number" }, n)])),
      pairs.length ? null : h("p", { class: "soft" }, "No batch yet."));
  }

  async function draw() {
    const curves = await get("/v1/curves");
    for (const { chart, definition } of charts) {
      const columns = definition.lines.map((line) => curves.metrics[line.metric] ?? curves.steps.map(() => null));
      chart.update([curves.steps, ...columns]);
      chart.element.hidden = curves.steps.length > 0 && columns.every((column) => column.every((value) => value === null));
    }
    const rows = curves.evaluations;
    heldout.update([rows.map((row) => row.version), rows.map((row) => row.accuracy), rows.map((row) => row.high), rows.map((row) => row.low)]);
  }

  const screen = {
    status: head,
    event() {
      fill(events, app.events.slice(-60).reverse().map((one) => h("li", {}, h("time", {}, new Date(1000 * one.at).toLocaleTimeString()), h("span", {}, one.text))),
        app.events.length ? null : h("li", { class: "soft" }, "Nothing since this page was opened."));
    },
    happened(kind) { if (kind === "version" || kind === "evaluation") later(draw); },
  };
  const status = app.status ?? await get("/v1/status");
  app.status = status;
  head(status);
  screen.event();
  await draw();
  return screen;
}

let waiting = null;
function later(work) {
  clearTimeout(waiting);
  waiting = setTimeout(() => work().catch(() => {}), 300);
}
