// Line charts by uPlot. The canvas holds lines only: ticks, legend, title and values are HTML.
import { duration, figure, h } from "./dom.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Set();
dark.addEventListener("change", () => drawn.forEach((plot) => plot.redraw(false)));

function ticks(plot) {
  const box = plot.root.querySelector(".u-wrap");
  box.querySelectorAll(".tick").forEach((old) => old.remove());
  const { offsetLeft: left, offsetTop: top, offsetHeight: height } = plot.over;
  for (const value of plot.axes[0]._splits ?? []) {
    const tick = h("span", { class: "tick" }, (plot.isTime ? duration : figure)(value));
    tick.style.left = `${left + plot.valToPos(value, "x")}px`;
    tick.style.top = `${top + height + 5}px`;
    tick.style.transform = "translateX(-50%)";
    box.append(tick);
  }
  for (const value of plot.axes[1]._splits ?? []) {
    const tick = h("span", { class: "tick" }, figure(value));
    tick.style.right = `${box.clientWidth - left + 6}px`;
    tick.style.top = `${top + plot.valToPos(value, "y") - 5}px`;
    box.append(tick);
  }
}

const TIMES = [1, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 604800];
const WHOLE = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5].map((power) => digit * 10 ** power)).sort((a, b) => a - b);

function spread(_, low, high) {
  if (low === null || low === high) return [Math.min(0, low ?? 0), Math.max(1, 2 * (high ?? 0))];
  const room = 0.06 * (high - low);
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

// The legend shows the last values while nobody points at the chart.
const newest = (plot) => requestAnimationFrame(() => plot.setLegend({ idx: plot.data[0].length - 1 }));

// The first line of a chart with a band has it as its interval.
function interval(definition, index, plot, at) {
  const [high, low] = definition.bands?.[0] ?? [];
  if (index || !high || at === null || at === undefined || plot.data[low][at] === null || plot.data[low][at] === undefined) return "";
  return ` (${figure(plot.data[low][at])} to ${figure(plot.data[high][at])})`;
}

function options(definition, width, height) {
  const series = definition.lines.map((line, index) => ({
    label: line.label, scale: "y", width: line.hidden ? 0 : 1.8, points: { show: Boolean(line.points), size: 5 }, spanGaps: true,
    stroke: () => colour(line.colour ?? `--c${index + 1}`), value: (plot, value, _, at) => figure(value) + interval(definition, index, plot, at), show: true,
  }));
  const axis = { stroke: "transparent", grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false },
    values: (_, splits) => splits.map(() => "") };
  return {
    width, height, padding: [8, 10, 0, 0], cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
    legend: { show: true, live: true },
    scales: { x: { time: false, range: (_, low, high) => (low === high ? [low, low + 1] : [low, high]) }, y: { range: definition.range ?? spread } },
    axes: [{ ...axis, size: 22, space: 60, incrs: definition.x === "time" ? TIMES : WHOLE }, { ...axis, size: 46, space: 28 }],
    series: [{ label: definition.x ?? "step", value: (_, value) => (value === null ? "–" : (definition.x === "time" ? duration : figure)(value)) }, ...series],
    bands: (definition.bands ?? []).map(([high, low, name]) => ({ series: [high, low], fill: () => `${colour(name)}2e` })),
    hooks: { init: [(plot) => { plot.isTime = definition.x === "time"; }], draw: [ticks], ready: [(plot) => {
      plot.over.addEventListener("mouseleave", () => newest(plot));
      const rows = plot.root.querySelectorAll(".u-legend .u-series");
      definition.lines.forEach((line, index) => { if (line.hidden) rows[index + 1].style.display = "none"; });
    }] },
  };
}

export class Chart {
  constructor(title, caption, definition, onSelect) {
    this.definition = definition;
    this.now = h("span", { class: "now" });
    this.place = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `${title}. ${caption}` });
    this.element = h("figure", { class: `card${definition.wide ? " wide" : ""}` },
      h("figcaption", {}, h("b", {}, title), h("span", { class: "soft small optional" }, caption), this.now), this.place);
    this.onSelect = onSelect;
    this.place.addEventListener("keydown", (event) => this.#key(event));
    this.place.addEventListener("click", () => this.#select());
    new ResizeObserver(() => this.#resize()).observe(this.place);
  }

  update(data) {
    this.data = data;
    const last = (data[1] ?? []).findLast((value) => value !== null && value !== undefined);
    this.now.textContent = last === undefined ? "" : figure(last);
    this.place.setAttribute("aria-valuetext", last === undefined ? "no value yet" : `last value ${figure(last)}`);
    if (this.plot) { this.plot.setData(data); newest(this.plot); } else this.#draw();
  }

  #draw() {
    if (!this.data || !this.place.clientWidth || !this.data[0].length) return;
    this.plot = new uPlot(options(this.definition, this.place.clientWidth, this.place.clientHeight - 26), this.data, this.place);
    drawn.add(this.plot);
    newest(this.plot);
  }

  #resize() {
    if (!this.place.isConnected && this.plot) { drawn.delete(this.plot); return; }
    if (!this.plot) this.#draw();
    else if (this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: this.place.clientHeight - 26 });
  }

  #select() {
    const index = this.plot?.cursor.idx;
    if (index !== null && index !== undefined) this.onSelect?.(this.data[0][index]);
  }

  #key(event) {
    if (!this.plot) return;
    const last = this.data[0].length - 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move !== undefined) {
      event.preventDefault();
      const index = Math.min(last, Math.max(0, (this.plot.cursor.idx ?? last) + move));
      this.plot.setCursor({ left: this.plot.valToPos(this.data[0][index], "x"), top: 10 });
    } else if (event.key === "Enter") this.#select();
  }
}
