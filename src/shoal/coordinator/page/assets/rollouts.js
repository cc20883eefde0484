// From a curve to a token: steps, the groups of a step, the completions of a group side by side, token overlays.
import { get } from "./data.js";
import { chip, clean, duration, facts, figure, fill, h, percent, short, table } from "./dom.js";
import { submissions } from "./workers.js";

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const dots = (rewards) => rewards.map((value) => figure(value)).join("  ");

export async function steps(place, _, app) {
  const curves = await get("/v1/curves");
  const rows = curves.steps.map((step, index) => ({ step, reward: curves.metrics.reward_mean?.[index], length: curves.metrics.output_length_mean?.[index],
    age: curves.metrics.age_mean?.[index], at_s: curves.published_s[index] })).reverse();
  const field = h("input", { type: "number", min: 0, value: app.status?.step ?? 0, "aria-label": "Step" });
  fill(place, h("div", { class: "card" },
    h("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); location.hash = `#/step/${field.value}`; } },
      h("h1", {}, "Rollouts"), h("span", { class: "soft" }, "Step"), field, h("button", { class: "plain" }, "Open")),
    table([
      { title: "Step", class: "number", cell: (row) => h("a", { href: `#/step/${row.step}` }, row.step) },
      { title: "Trained at", class: "number", cell: (row) => duration(row.at_s) },
      { title: "Reward", class: "number", cell: (row) => figure(row.reward) },
      { title: "Length", class: "number", cell: (row) => figure(row.length) },
      { title: "Age", class: "number", cell: (row) => figure(row.age) },
    ], rows.slice(0, 300), { empty: "No step is trained yet; open the current one above." })));
  return {};
}

export async function step(place, [number]) {
  const view = await get(`/v1/owner/steps/${encodeURIComponent(number)}`);
  const shown = ["reward_mean", "reward_std", "output_length_mean", "entropy", "truncation_rate", "kl_behaviour", "age_mean", "zero_signal_fraction"];
  fill(place,
    h("div", { class: "card" }, h("div", { class: "tools" },
      h("a", { href: `#/step/${Math.max(0, view.step - 1)}`, "aria-label": "Step before" }, "‹"), h("h1", {}, `Step ${view.step}`), h("a", { href: `#/step/${view.step + 1}`, "aria-label": "Next step" }, "›")),
      facts(shown.filter((name) => view.metrics[name] !== undefined).map((name) => [name.replaceAll("_", " "), figure(view.metrics[name])]))),
    h("div", { class: "card" }, h("h2", {}, "Groups"), table([
      { title: "Group", cell: (row) => h("a", { href: `#/group/${row.group_id}` }, row.group_id) },
      { title: "State", cell: (row) => [chip(row.state), row.batch_step !== null && row.batch_step !== view.step ? ` in step ${row.batch_step}` : "", row.deferred ? h("span", { class: "chip quiet" }, "deferred") : null] },
      { title: "Mean reward", class: "number", cell: (row) => figure(mean(row.rewards)) },
      { title: "Task rewards", class: "mono", cell: (row) => dots(row.task_rewards) },
      { title: "Tokens", class: "number", cell: (row) => row.tokens },
      { title: "Version", class: "number", cell: (row) => row.policy_version },
      { title: "Worker", class: "name", cell: (row) => h("a", { href: `#/worker/${row.worker}` }, clean(row.worker_name, 40) || short(row.worker)) },
    ], view.groups, { empty: "No group of this step is accepted." })),
    h("div", { class: "card" }, h("h2", {}, "Submissions"), submissions(view.submissions)));
  return {};
}

// Title, how much of it a token has, the least amount that is drawn darkest, colour. The darkest token of the group has the most.
const OVERLAYS = {
  none: ["Text", () => 0, 1, ""],
  logprob: ["Log-probability", (token) => -(token.logprob ?? 0), 0.5, "--c1"],
  entropy: ["Entropy", (token) => token.entropy ?? 0, 0.2, "--c4"],
  margin: ["Audit margin", (token) => token.margin ?? 0, 0.01, "--c5"],
};

export async function group(place, [step, slot, number]) {
  const view = await get(`/v1/owner/groups/${[step, slot, number].map(encodeURIComponent).join("/")}`);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at a token to see its numbers; with the keyboard, go to the text and use the arrow keys.");
  const scale = h("span", { class: "small" });
  const panels = view.completions.map((one) => completion(one, readout));
  const buttons = Object.entries(OVERLAYS).map(([name, [title]]) => {
    const known = name === "none" || view.completions.some((one) => one.turns.some((turn) => turn.tokens.some((token) => token[name] !== null)));
    return h("button", { class: "plain", type: "button", "aria-pressed": "false", disabled: !known, title: known ? "" : "not recorded",
      onclick: (event) => { paint(name); buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === event.currentTarget))); } }, title);
  });
  function paint(name) {
    const [, value, least, colour] = OVERLAYS[name];
    const tokens = panels.flatMap((panel) => panel.spans);
    const most = tokens.reduce((found, [, token]) => Math.max(found, value(token)), least);
    for (const [span, token] of tokens) {
      span.style.setProperty("--heat-colour", colour ? `var(${colour})` : "transparent");
      span.style.setProperty("--heat", `${Math.round(70 * Math.max(0, value(token)) / most)}%`);
    }
    scale.textContent = colour ? `Darkest: ${figure(name === "logprob" ? -most : most)}.` : "";
  }
  const verdict = view.verdict;
  fill(place,
    h("div", { class: "card" }, h("h1", {}, `Group ${view.group_id} `, chip(view.state)),
      facts([["Task", clean(view.task_id, 60)], ["Version", view.policy_version, `age ${view.age}`], ["Verdict", verdict.accepted === null ? verdict.state : verdict.accepted ? "accepted" : "rejected", verdict.audited ? "audited" : "not audited"],
        ["Audit rate", percent(verdict.audit_rate)], ["Largest margin", verdict.audited ? figure(verdict.metrics.margin_max ?? 0) : "–"]]),
      h("p", {}, "By ", h("a", { href: `#/worker/${view.worker}` }, clean(view.worker_name, 60) || short(view.worker)), ". ",
        verdict.accepted ? "" : `${verdict.words} `, h("span", { class: "soft" }, clean([verdict.reasons.join(", "), verdict.detail].filter(Boolean).join(": "), 600))),
      h("div", { class: "tools", role: "group", "aria-label": "Colour tokens by" }, h("span", { class: "soft" }, "Tokens:"), buttons, scale, h("span", { class: "soft small" }, view.overlay)), readout),
    h("div", { class: "samples" }, panels.map((panel) => panel.element)));
  buttons[0].setAttribute("aria-pressed", "true");
  return {};
}

function completion(one, readout) {
  const spans = [];
  let chosen = -1;
  const tell = (index) => {
    spans[chosen]?.[0].classList.remove("chosen");
    chosen = Math.min(spans.length - 1, Math.max(0, index));
    const [span, token] = spans[chosen];
    span.classList.add("chosen");
    readout.textContent = `Sample ${one.sample}, token ${chosen + 1} of ${spans.length}, ${JSON.stringify(token.text)}: log-probability ${figure(token.logprob)}, entropy ${figure(token.entropy)}, margin ${figure(token.margin)}`;
  };
  const moves = { ArrowLeft: () => chosen - 1, ArrowRight: () => chosen + 1, Home: () => 0, End: () => spans.length - 1 };
  const key = (event) => { if (moves[event.key] && spans.length) { event.preventDefault(); tell(moves[event.key]()); } };
  const sampled = one.turns.filter((turn) => turn.speaker === "policy").length;
  let number = 0;
  const turns = one.turns.map((turn) => h("section", { class: `turn ${turn.speaker}` },
    h("h3", {}, turn.speaker === "policy" && sampled > 1 ? `policy, turn ${++number} of ${sampled}` : turn.speaker),
    turn.tokens.length ? h("div", { class: "text", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys move", onkeydown: key }, turn.tokens.map((token) => {
      const index = spans.length;
      const span = h("span", { class: "token", onmouseenter: () => tell(index), onclick: () => tell(index) }, token.text);
      spans.push([span, token]);
      return span;
    })) : h("div", { class: "text" }, turn.text)));
  return { spans, element: h("article", { class: "card" },
    h("h2", {}, `Sample ${one.sample}: reward ${figure(one.reward)}`),
    h("p", { class: "small" }, one.why ? clean(one.why, 400) : h("span", { class: "soft" }, "no reason recorded")),
    h("p", { class: "small soft" }, `task reward ${figure(one.task_reward)}, ${one.length} tokens`, one.target_length ? `, asked for ${one.target_length}` : "",
      one.finish_reason === "length" ? ", cut at the limit" : "", one.reward_from === "worker" ? "; the worker's claim" : ""), turns) };
}
