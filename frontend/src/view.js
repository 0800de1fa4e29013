// One view of a run: header, progress, notice, plots. Reads the store, writes nothing but the Stop request.

import uplotCss from "uplot/dist/uPlot.min.css";
import css from "./live.css";
import { elapsed, figure, horizon, progress } from "./format.js";
import { element } from "./dom.js";
import { MeterPanel, RatePanel, StepPanel, unitOf } from "./panels.js";
import { isDark, palette, watchTheme } from "./theme.js";

const NARROW_PX = 620;
/** What each phase is called, in the order in which a run has them, and what it means. */
const TIMING = ["timing", "Steps are timed without the profiler; these are the times that count."];
const PHASES = {
  "warm-up": ["warm-up", "The first steps are slower and are not counted.", "warm-up"],
  measuring: TIMING,
  profiling: ["tracing", "PyTorch's profiler traces a few steps, which slows them down. They give the step breakdown.", "traced"],
  "after profiling": TIMING,
  ending: ["ending", "The run has ended; the report is being built."],
};
const BAND = 2;
const TICK_MS = 250;
let viewCount = 0;

export function mount(el, store) {
  const view = new View(el, store);
  return () => view.destroy();
}

class View {
  constructor(el, store) {
    this.store = store;
    this.syncKey = `gpulab-live-${++viewCount}`;
    this.frame = 0;
    this.visible = true;
    element("style", "", el, uplotCss + css);
    this.root = element("div", "gpulab-live", el);
    this.#header();
    this.#plots();
    this.#watch();
    store.views.add(this);
    this.invalidate();
  }

  #header() {
    const head = element("div", "gp-head", this.root);
    this.device = element("span", "gp-device", head, "gpulab");
    this.phase = element("span", "gp-phase", head, "starting");
    const figures = element("span", "gp-figures", head);
    this.elapsed = element("b", "", element("span", "gp-figure gp-elapsed", figures), "0:00");
    this.elapsed.after(" elapsed");
    this.rate = element("b", "", element("span", "gp-figure gp-rate", figures), "–");
    this.rateUnit = document.createTextNode(" samples/s");
    this.rate.after(this.rateUnit);
    this.stop = element("button", "gp-stop", head, "Stop");
    this.stop.type = "button";
    this.stop.title = "Stop the run at the next step boundary; the report is still made";
    this.stop.addEventListener("click", () => this.store.requestStop());
    const row = element("div", "gp-progress", this.root);
    this.progressText = element("span", "gp-progress-text", row, "before the first step");
    this.track = element("div", "gp-track", row);
    this.track.setAttribute("role", "progressbar");
    this.track.hidden = true;
    this.bar = element("div", "gp-bar", this.track);
    const notices = element("div", "gp-notices", this.root);
    this.alert = element("span", "gp-alert", notices);
    this.notice = element("span", "gp-notice", notices);
    this.notice.setAttribute("role", "status");
    this.message = element("div", "gp-message", this.root);
  }

  #plots() {
    this.grid = element("div", "gp-grid", this.root);
    const shared = { syncKey: this.syncKey, bands: () => this.#bands(false) };
    const meter = (parent, more) => new MeterPanel(parent, { ...shared, ...more });
    const wait = "waiting for the first reading";
    const percent = { title: "Device activity, %", unit: "%", plot: "percent", empty: wait };
    this.steps = new StepPanel(this.grid, { ...shared, bands: () => this.#bands(true) });
    this.rates = new RatePanel(this.grid, shared);
    this.percent = meter(this.grid, percent);
    this.side = element("div", "gp-side", this.grid);
    this.memory = meter(this.side, { title: "Memory", unit: "GiB", plot: "memory", empty: wait, titleUntilNamed: true });
    this.power = null; // only where something measures it
    this.meter = meter;
  }

  get panels() {
    return [this.steps, this.rates, this.percent, this.memory, this.power].filter(Boolean);
  }

  #watch() {
    this.resizeObserver = new ResizeObserver(() => {
      this.root.toggleAttribute("data-narrow", this.root.clientWidth < NARROW_PX);
      this.invalidate();
    });
    this.resizeObserver.observe(this.root);
    this.intersectionObserver = new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
      this.invalidate();
    });
    this.intersectionObserver.observe(this.root);
    this.endTheme = watchTheme(() => this.invalidate());
    this.timer = setInterval(() => this.#tick(), TICK_MS); // also while Python says nothing
  }

  invalidate() {
    if (this.frame || !this.visible) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.#draw();
    });
  }

  #draw() {
    this.root.dataset.theme = isDark() ? "dark" : "light";
    const { status } = this.store;
    this.#drawStop();
    if (!status) return;
    this.#drawHeader(status);
    if (!this.power && this.store.series.some((info) => unitOf(info).plot === "power")) {
      this.power = this.meter(this.side, { title: "Power", unit: "W", plot: "power", empty: "", titleUntilNamed: true });
    }
    const colors = palette();
    const xMax = horizon(status.elapsed_s);
    // small until there is something to draw
    this.root.toggleAttribute("data-before-steps", !this.store.steps.length);
    this.root.toggleAttribute("data-before-readings", !this.store.curves.size);
    for (const panel of this.panels) {
      panel.draw(this.store, colors, xMax);
      panel.resize();
    }
  }

  #drawHeader(status) {
    const over = this.store.ended ? "run ended" : this.store.lost ? "connection lost" : "";
    const [phase, meaning] = PHASES[status.phase] ?? [status.phase, ""];
    write(this.device, status.device_label);
    write(this.phase, over || phase);
    this.phase.title = over ? "" : meaning;
    this.phase.toggleAttribute("data-ended", this.store.ended || this.store.lost);
    this.#tick();
    const rate = this.store.steps.throughput();
    write(this.rate, figure(rate?.value));
    if (rate) this.rateUnit.data = ` ${rate.unit}, mean of recent steps`;
    const { text, fraction } = progress(status);
    write(this.progressText, text);
    this.track.hidden = fraction === null;
    if (fraction !== null) {
      this.bar.style.width = `${(100 * fraction).toFixed(1)}%`;
      this.track.setAttribute("aria-valuenow", String(Math.round(100 * fraction)));
    }
  }

  #tick() {
    if (this.store.status) write(this.elapsed, elapsed(this.store.elapsed));
  }

  #drawStop() {
    const { store } = this;
    this.stop.disabled = !store.canStop;
    const ended = store.ended ? "The run has ended; the report follows here." : "";
    const lost = store.lost ? "The kernel was restarted or has ended, and so has the run." : "";
    const notice = store.stopNote || ended || lost;
    write(this.notice, notice);
    write(this.message, ended || lost ? "" : store.status?.message ?? "");
    this.message.title = this.message.textContent;
    this.notice.title = notice;
    const alert = store.ended || store.lost ? "" : store.status?.alert ?? "";
    write(this.alert, alert);
    this.alert.title = alert;
  }

  #bands(labelled) {
    const { phases, status } = this.store;
    return phases.flatMap(({ phase, from }, i) => {
      const label = PHASES[phase]?.[BAND];
      if (!label) return [];
      return [{ from, to: phases[i + 1]?.from ?? status.elapsed_s, label: labelled ? label : "" }];
    });
  }

  destroy() {
    this.store.views.delete(this);
    cancelAnimationFrame(this.frame);
    this.resizeObserver.disconnect();
    this.intersectionObserver.disconnect();
    this.endTheme();
    clearInterval(this.timer);
    for (const panel of this.panels) panel.destroy();
  }
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
