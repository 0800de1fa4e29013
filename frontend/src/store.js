// One run as the browser knows it. Lives as long as the widget's model; views only draw it.

import { Clock } from "./clock.js";
import { Curve, StepHistory } from "./history.js";
import { decode } from "./message.js";
import { STOP_NOTES, stopRun } from "./stop.js";

const NO_STEP_MS = 4000; // the kernel ends code without steps after two seconds; what it cannot end is said then
const NOTES = {
  ...STOP_NOTES,
  asking: "Stopping …",
  waiting: "No step has finished since. To stop mid-step, interrupt the kernel (■).",
  over: "",
};

export class Store {
  constructor(model) {
    this.model = model;
    this.status = null;
    this.clock = new Clock();
    this.series = [];
    this.curves = new Map();
    this.steps = new StepHistory();
    this.phases = []; // {phase, from}: seconds since the run began
    this.ended = false;
    this.stop = "idle"; // idle, asking, heard, waiting (for a step, for long), over, interrupted, unreachable
    this.views = new Set();
    this.whenHeard = null;
    this.lost = false; // the kernel went away in the middle of the run
    const onMessage = (head, buffers) => this.accept(head, buffers);
    const onConnection = () => this.lose(); // the widget manager: no comm of this model is open any more
    model.on("msg:custom", onMessage);
    model.on("comm_live_update", onConnection);
    this.close = () => {
      model.off("msg:custom", onMessage);
      model.off("comm_live_update", onConnection);
      clearTimeout(this.patience);
    };
  }

  accept(head, buffers) {
    const delta = decode(head, buffers);
    if (!delta) return;
    this.status = delta.status;
    this.clock.hear({ since_s: 0, sent_s: delta.status.elapsed_s });
    this.lost = false;
    this.ended = this.ended || delta.ended;
    this.series = delta.series;
    this.#enter(delta.status.phase, delta.status.elapsed_s);
    const s = delta.steps;
    for (let i = 0; i + 3 < s.length; i += 4) this.steps.push(s[i], s[i + 1], s[i + 2], s[i + 3]);
    for (const { name, rows } of delta.samples) {
      if (!this.curves.has(name)) this.curves.set(name, new Curve());
      const curve = this.curves.get(name);
      for (let i = 0; i + 1 < rows.length; i += 2) curve.push(rows[i], rows[i + 1]);
    }
    if (delta.status.stop_requested) {
      if (this.stop === "idle" || this.stop === "asking") this.#hear();
      this.whenHeard?.();
    }
    this.changed();
  }

  #hear() {
    this.stop = "heard";
    this.patience = setTimeout(() => {
      if (this.stop === "heard") this.stop = "waiting";
      this.changed();
    }, NO_STEP_MS);
  }

  #enter(phase, from) {
    if (this.phases[this.phases.length - 1]?.phase === phase) return;
    this.phases.push({ phase, from: this.phases.length ? from : 0 });
  }

  lose() {
    if (this.ended || this.lost) return;
    this.lost = true;
    this.changed();
  }

  changed() {
    for (const view of this.views) view.invalidate();
  }

  /** Seconds since the run began: by this page's clock while it goes on. */
  get elapsed() {
    return this.ended || this.lost ? this.status.elapsed_s : this.clock.elapsed;
  }

  get stopNote() {
    return this.ended || this.lost ? "" : NOTES[this.stop] ?? "";
  }

  get canStop() {
    return !this.ended && !this.lost && (this.stop === "idle" || this.stop === "unreachable");
  }

  async requestStop() {
    if (!this.canStop) return;
    this.stop = "asking";
    this.changed();
    const viaComm = () =>
      new Promise((resolve) => {
        this.whenHeard = () => resolve(true);
        this.model.send({ kind: "stop" });
      });
    const kernel = this.model.widget_manager?.kernel;
    const answer = await stopRun(kernel, this.model.get("run_key"), viaComm);
    this.whenHeard = null;
    if (this.stop === "asking" && answer === "heard") this.#hear();
    else if (this.stop === "asking") this.stop = answer;
    this.changed();
  }
}
