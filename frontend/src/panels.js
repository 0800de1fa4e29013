// What each plot of the live view shows: a caption with the curves' names and figures, and the drawn curves.

import { cappedAxis, roundUp } from "./axis.js";
import { Chart, join } from "./chart.js";
import { element } from "./dom.js";
import { figure, grouped } from "./format.js";

const GIB = 2 ** 30;
const RATE_NOTE = "per second of step time";

/** How a unit is drawn: on which plot, times what, and how its figure reads. */
const UNITS = {
  "%": { plot: "percent", factor: 1 },
  pct: { plot: "percent", factor: 1 },
  percent: { plot: "percent", factor: 1 },
  fraction: { plot: "percent", factor: 100 },
  bytes: { plot: "memory", factor: 1 / GIB },
  W: { plot: "power", factor: 1 },
  w: { plot: "power", factor: 1 },
};

export function unitOf(info) {
  return UNITS[info.unit] ?? { plot: null, factor: 1 };
}

export function labelOf({ label, source }) {
  return !source || label.includes(`(${source})`) ? label : `${label} (${source})`;
}

class Panel {
  constructor(parent, plot, title, empty) {
    this.root = element("div", "gp-panel", parent);
    this.root.dataset.plot = plot;
    this.caption = element("div", "gp-caption", this.root);
    this.title = element("span", "gp-title", this.caption, title);
    this.items = [];
    this.plotHost = element("div", "gp-plot", this.root);
    this.empty = element("div", "gp-empty", this.plotHost, empty);
    this.chart = null;
    this.signature = "";
    this.cursor = null;
  }

  /** Replaces caption items and chart where the set of curves has changed. */
  shape(items, options) {
    const signature = JSON.stringify(items.map(({ label }) => label));
    if (signature === this.signature) return;
    this.signature = signature;
    for (const item of this.items) item.root.remove();
    this.items = items.map(({ label, area }) => {
      const root = element("span", "gp-item", this.caption);
      const swatch = element("i", area ? "gp-area" : "", root);
      element("span", "", root, label);
      root.title = label;
      return { root, swatch, value: element("b", "", root) };
    });
    if (this.note) this.caption.append(this.note); // stays last
    if (this.titleUntilNamed) this.title.hidden = items.length > 0;
    this.chart?.destroy();
    this.chart = items.length ? new Chart(this.plotHost, { ...options, onCursor: (i) => this.#point(i) }) : null;
    this.empty.hidden = items.length > 0;
    this.empty.style.display = items.length > 0 ? "none" : "";
  }

  #point(index) {
    if (index === this.cursor) return;
    this.cursor = index;
    this.tell?.();
  }

  say(k, color, text) {
    const item = this.items[k];
    item.swatch.style.background = color;
    if (item.value.textContent !== text) item.value.textContent = text;
  }

  resize() {
    this.chart?.resize();
  }

  destroy() {
    this.chart?.destroy();
  }
}

/** Curves of the device's meters that share one unit. */
export class MeterPanel extends Panel {
  constructor(parent, { title, unit, plot, syncKey, bands, empty, titleUntilNamed = false }) {
    super(parent, plot, title, empty);
    Object.assign(this, { unit, plot, syncKey, bands, titleUntilNamed, data: null });
  }

  draw(store, colors, xMax) {
    const infos = this.#shown(store);
    this.shape(
      infos.map((info) => ({ label: labelOf(info) })),
      {
        lines: infos.map((_, k) => ({ color: (p) => p.series[k % p.series.length], points: false })),
        syncKey: this.syncKey,
        bands: this.bands,
      },
    );
    if (!infos.length) return;
    const tables = infos.map((info) => {
      const { factor } = unitOf(info);
      const curve = store.curves.get(info.name);
      return [curve.t, factor === 1 ? curve.value : curve.value.map((v) => (v === null ? null : v * factor))];
    });
    this.data = tables.length > 1 ? join(tables) : tables[0];
    let max = 0;
    for (const [, values] of tables) for (const v of values) if (v > max) max = v;
    this.chart.draw(this.data, xMax, this.plot === "percent" ? percentTop(max) : roundUp(max * 1.1));
    this.tell = () => this.#tell(colors);
    this.tell();
  }

  #shown({ series, curves }) {
    const infos = series.filter((info) => unitOf(info).plot === this.plot && curves.has(info.name));
    const gpu = infos.filter(({ name }) => name.startsWith("gpu_"));
    return this.plot === "memory" && gpu.length ? gpu : infos; // beside a GPU's memory the host's is no scale to read
  }

  #tell(colors) {
    for (let k = 0; k < this.items.length; k++) {
      const value = reading(this.data[k + 1], this.cursor);
      const text = value === null ? "–" : this.unit === "%" ? `${Math.round(value)} %` : `${figure(value)} ${this.unit}`;
      this.say(k, colors.series[k % colors.series.length], text);
    }
  }
}

/** A meter's rounding may pass 100 by a little; that does not deserve another axis. */
function percentTop(max) {
  return max > 110 ? roundUp(max) : Math.max(100, max);
}

/** The value under the cursor, else the last one; where meters differ in time, the last reading before. */
function reading(values, cursor) {
  let i = cursor === null ? values.length - 1 : Math.min(cursor, values.length - 1);
  while (i >= 0 && values[i] === undefined) i--;
  return i < 0 ? null : values[i];
}

/** What a figure of the caption is of, while no cursor picks a point. */
function lastOf(steps, cursor) {
  if (cursor !== null) return "";
  return steps.group > 1 ? "last point" : "last step";
}

/** Step time with its data wait beneath. */
export class StepPanel extends Panel {
  constructor(parent, { syncKey, bands }) {
    super(parent, "steps", "Step time, ms", "waiting for the first step");
    this.syncKey = syncKey;
    this.bands = bands;
    this.note = element("span", "gp-note", this.caption);
  }

  draw(store, colors, xMax) {
    const steps = store.steps;
    if (!steps.length) return;
    const grouping = steps.group > 1;
    const items = [{ label: "data wait", area: true }, { label: "step" }];
    if (grouping) items.push({ label: "slowest" });
    const lines = [
      { color: (p) => p.wait, fill: (p) => p.waitFill, width: 1, points: false },
      { color: (p) => p.step, points: !grouping },
    ];
    if (grouping) lines.push({ color: (p) => p.slowest, width: 1, points: false });
    this.shape(items, { lines, syncKey: this.syncKey, bands: this.bands });
    const data = [steps.end, steps.wait, steps.wall];
    if (grouping) data.push(steps.slowest);
    const { top, above, largest } = cappedAxis(steps.slowest);
    this.chart.draw(data, xMax, top);
    this.#explain(steps, above, largest);
    this.tell = () => this.#tell(steps, colors);
    this.tell();
  }

  #explain(steps, above, largest) {
    const parts = [steps.group > 1 ? `each point: mean of up to ${grouped(steps.group)} steps` : "one point per step"];
    if (above) parts.push(`${grouped(above)} off scale, max ${figure(largest)} ms`);
    const text = parts.join(" · ");
    if (this.note.textContent !== text) this.note.textContent = text;
  }

  #tell(steps, colors) {
    const i = this.cursor === null ? steps.length - 1 : Math.min(this.cursor, steps.length - 1);
    const [wall, wait] = [steps.wall[i], steps.wait[i]];
    const last = lastOf(steps, this.cursor);
    const share = wall > 0 ? ` (${Math.round((100 * wait) / wall)} %${last && ` of ${last}`})` : "";
    this.say(0, colors.wait, `${figure(wait)} ms${share}`);
    this.say(1, colors.step, `${figure(wall)} ms`);
    if (this.items.length > 2) this.say(2, colors.slowest, `${figure(steps.slowest[i])} ms`);
  }
}

/** Samples (or steps) per second, over each point's steps. */
export class RatePanel extends Panel {
  constructor(parent, { syncKey, bands }) {
    super(parent, "throughput", "Throughput", "waiting for the first step");
    this.syncKey = syncKey;
    this.bands = bands;
    this.note = element("span", "gp-note", this.caption, RATE_NOTE);
  }

  draw(store, colors, xMax) {
    const steps = store.steps;
    if (!steps.length) return;
    const unit = steps.samplesKnown ? "samples/s" : "steps/s";
    this.shape([{ label: unit }], {
      lines: [{ color: (p) => p.series[1], points: false }],
      syncKey: this.syncKey,
      bands: this.bands,
    });
    const values = steps.rates();
    const { top, above, largest } = cappedAxis(values);
    this.chart.draw([steps.end, values], xMax, top);
    const text = above ? `${RATE_NOTE} · ${grouped(above)} off scale, max ${figure(largest)}` : RATE_NOTE;
    if (this.note.textContent !== text) this.note.textContent = text;
    this.tell = () => {
      const last = lastOf(steps, this.cursor);
      this.say(0, colors.series[1], figure(reading(values, this.cursor)) + (last && ` (${last})`));
    };
    this.tell();
  }
}

export { element };
