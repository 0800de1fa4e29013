// What runs, wherever it is shown: Stop, a bar, and words whose time goes on by itself.

import { Clock } from "./clock.js";
import { element } from "./dom.js";
import { lasting } from "./format.js";
import { STOP_NOTES, stopRun } from "./stop.js";

const TICK_MS = 250;

/** A line of words, and the share of the bar: `rest` follows the time, `whole_s` is what all takes, where that is known. */
export function line({ words, rest, whole_s, fraction }, elapsed) {
  if (elapsed === null) return { text: words, share: fraction };
  const share = whole_s ? Math.min(1, Math.max(fraction, elapsed / whole_s)) : fraction;
  return { text: `${words} · ${lasting(elapsed)}${rest}`, share };
}

export class Running {
  /** Of the model's `status`; `ask` tells Python to stop where there is no control channel. */
  constructor(parent, model, hint, ask) {
    this.model = model;
    this.ask = ask;
    this.clock = new Clock();
    this.root = element("div", "gp-now", parent);
    this.stop = element("button", "gp-stop", this.root, "Stop");
    this.stop.type = "button";
    this.stop.title = hint;
    this.stop.addEventListener("click", () => this.#stopRun());
    this.track = element("div", "gp-track", this.root);
    this.track.setAttribute("role", "progressbar");
    this.bar = element("div", "gp-bar", this.track);
    this.words = element("span", "gp-words", this.root);
    this.note = ""; // what the reader's Stop has come to
    this.timer = setInterval(() => this.#tick(), TICK_MS);
  }

  /** `fresh`: the status has come just now. */
  draw(fresh, lost = false) {
    const status = this.model.get("status");
    this.on = Boolean(status.running) && !lost;
    this.stop.hidden = this.track.hidden = !this.on;
    if (!this.on) {
      this.stop.disabled = false;
      this.note = "";
    }
    this.clock.hear(this.on ? status : {}, fresh);
    this.#tick();
  }

  #tick() {
    const status = this.model.get("status");
    const { text, share } = line(this.note ? { ...status, words: this.note, rest: "" } : status, this.clock.elapsed);
    const words = this.on ? text : "";
    if (this.words.textContent !== words) this.words.textContent = words;
    if (!this.on) return;
    this.bar.style.width = `${(100 * share).toFixed(1)}%`;
    this.track.setAttribute("aria-valuenow", String(Math.round(100 * share)));
  }

  async #stopRun() {
    this.stop.disabled = true;
    this.note = "Stopping …";
    this.#tick();
    const viaComm = () => {
      this.ask();
      return new Promise((resolve) => {
        const heard = () => {
          const { running, stopping } = this.model.get("status");
          if (running && !stopping) return;
          this.model.off("change:status", heard);
          resolve(true);
        };
        this.model.on("change:status", heard);
      });
    };
    const answer = await stopRun(this.model.widget_manager?.kernel, this.model.get("run_key"), viaComm);
    this.note = STOP_NOTES[answer] ?? "";
    if (answer === "unreachable" || answer === "over") this.stop.disabled = false;
    this.#tick();
  }

  end() {
    clearInterval(this.timer);
  }
}
