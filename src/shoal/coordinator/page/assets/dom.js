// Elements, text and numbers. Text of other people reaches the page through textContent only.

export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.startsWith("--")) element.style.setProperty(key, value);
    else if (key === "left" || key === "width") element.style[key] = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

const FOCUSABLE = "a[href], button, input, select, [tabindex]";

// Live screens are drawn again and again: whoever uses the keyboard stays where they are.
export function fill(element, ...children) {
  const place = element.contains(document.activeElement) ? [...element.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement) : -1;
  element.textContent = "";
  add(element, children);
  if (place >= 0) element.querySelectorAll(FOCUSABLE)[place]?.focus({ preventScroll: true });
  return element;
}

export function clean(text, limit = 200) {
  const line = String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "\ufffd");
  return line.length > limit ? line.slice(0, limit - 1) + "…" : line;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  return parts[0] ? `${parts[0]}:${two(parts[1])}:${two(parts[2])}` : `${parts[1]}:${two(parts[2])}`;
}

function scaled(value, units) {
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < units.length - 1) { value /= 1000; power += 1; }
  return value.toFixed(power && Math.abs(value) < 99.95 ? 1 : 0) + units[power];
}
export const count = (value) => scaled(value, ["", "k", "M", "G", "T"]);
export const bytes = (value) => scaled(value, [" B", " kB", " MB", " GB", " TB"]);

export function figure(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 100000 ? String(value) : count(value);
  const size = Math.abs(value);
  return size >= 1000 ? count(value) : size >= 100 ? value.toFixed(0) : size >= 0.01 ? value.toPrecision(3) : size >= 0.001 ? value.toPrecision(2) : value ? value.toExponential(1) : "0";
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);
export const short = (key) => `${key.slice(0, 10)}…`;

const STATES = { active: "good", current: "good", banned: "bad", suspect: "warn", quarantined: "warn", gone: "quiet", running: "good", finished: "good",
  paused: "warn", draining: "warn", drained: "warn", accepted: "good", rejected: "bad", waiting: "quiet", consumed: "good",
  withdrawn: "bad", expired: "warn", no_signal: "quiet", stopped: "quiet" };
export const chip = (state) => h("span", { class: `chip ${STATES[state] ?? ""}` }, state.replaceAll("_", " "));

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value, remark]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value, remark ? h("small", {}, " ", remark) : null))));
}

export function table(columns, rows, options = {}) {
  const head = h("tr", {}, columns.map((column) => h("th", { class: column.class, scope: "col" }, column.title)));
  const body = h("tbody", {}, rows.length ? rows.map((row) =>
    h("tr", { class: options.rowClass?.(row) }, columns.map((column) => h("td", { class: column.class }, column.cell(row)))))
    : h("tr", {}, h("td", { colspan: columns.length, class: "soft" }, options.empty ?? "Nothing yet.")));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body));
}

export function copyable(text) {
  const button = h("button", { class: "plain", type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "copied"; }
    catch { getSelection().selectAllChildren(code); button.textContent = "selected"; }
  } }, "copy");
  const code = h("code", {}, text);
  return h("div", { class: "copy" }, code, button);
}
