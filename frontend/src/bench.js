// The bench of one cell: toggles, what runs, the table of runs, two of them side by side. Python says what there is, as
// data and as HTML that it has escaped; here it is drawn and made to answer.

import uplotCss from "uplot/dist/uPlot.min.css";
import { APPLY_NOTES, applyToCell } from "./apply.js";
import { drawCharts } from "./curves.js";
import { element } from "./dom.js";
import { Running } from "./running.js";
import { isDark, watchTheme } from "./theme.js";
import { chosenRows, order, settingsOf } from "./bench_state.js";

const LOST = "The kernel was restarted or has ended. Its rows are saved: %gpulab panel opens the bench again.";
const UNHEARD = "No answer from a kernel: it is busy, or there is none behind this page.";
const PATIENCE_MS = 5000;
const WHOLE = 0.95; // of the line of buttons is in view,
const ROOM_PX = 120; // and under it there is room for Stop, its bar and two lines of words

class Bench {
  constructor(model, el) {
    this.model = model;
    this.lost = false;
    this.sort = { by: "number", descending: false };
    this.root = element("div", "gp-bench", el);
    element("style", "", this.root, uplotCss + model.get("css"));
    this.#hideTwin();
    this.#head();
    this.toggles = element("div", "gp-toggles", this.root);
    this.#controls();
    const panes = element("div", "gp-panes", this.root);
    this.rows = element("div", "gp-table", panes);
    this.detail = element("div", "gp-detail", panes);
    this.prints = element("div", "gp-prints", this.root);
    this.keep = element("div", "gp-keep", this.root);
    this.#listen();
    this.#drawAll();
  }

  #hideTwin() {
    this.twin = element("style", "", document.head, `.gpulab-twin-${this.model.get("key")} { display: none; }`);
  }

  #head() {
    const head = element("div", "gp-benchhead", this.root);
    element("b", "", head, "Bench");
    element("span", "gp-quiet", head, "of the cell that begins");
    const cell = element("code", "", head, this.model.get("cell"));
    cell.title = this.model.get("code");
    this.close = this.#button(head, "Close", "Stop and close the bench; its runs are kept", () => this.#send("close"));
  }

  #controls() {
    const bar = element("div", "gp-controls", this.root);
    const line = element("div", "gp-buttons", bar);
    this.run = this.#button(line, "Run", "", () => this.#begin("run"));
    this.run.classList.add("gp-primary");
    this.each = this.#button(
      line,
      "Each by itself and together",
      "Measure each changed toggle alone and all together, interleaved; shows whether the gains add up",
      () => this.#begin("each"),
    );
    this.climb = this.#button(line, "Climb", "Let gpulab try the most promising settings one by one; each attempt adds a row", () =>
      this.#begin("climb"),
    );
    this.reset = this.#button(line, "Reset", "Reset all toggles to the values of the baseline", () => this.#send("choose", { settings: {} }));
    this.now = new Running(bar, this.model, "Stop at the next step; keeps what was measured", () => this.#send("stop"));
    this.message = element("div", "gp-message", bar);
    this.message.setAttribute("role", "status");
    // Stop stays in view: where its place is scrolled away, it floats over the page (in a box of its own: an output
    // has its own scrolling, and keeps what is fixed inside itself)
    this.float = element("div", "gp-bench gp-float", document.body);
    this.seen = new IntersectionObserver((entries) => {
      this.away = entries[entries.length - 1].intersectionRatio < WHOLE;
      this.#place();
    }, { threshold: WHOLE, rootMargin: `0px 0px -${ROOM_PX}px` });
    this.seen.observe(line);
  }

  #place() {
    const floats = this.away && this.running && !this.lost;
    (floats ? this.float : this.message.parentNode).insertBefore(this.now.root, floats ? null : this.message);
    this.float.hidden = !floats;
  }

  #button(parent, words, hint, action) {
    const button = element("button", "", parent, words);
    button.type = "button";
    button.title = hint;
    button.addEventListener("click", action);
    return button;
  }

  #send(what, more = {}) {
    this.model.send({ do: what, ...more });
  }

  #begin(what, more = { settings: settingsOf(this.model.get("toggles")) }) {
    this.#setRunning(true); // until Python says so itself: a second click must not start a second run
    this.unheard = setTimeout(() => (this.message.textContent = UNHEARD), PATIENCE_MS);
    this.#send(what, more);
  }

  #listen() {
    const draw = {
      toggles: () => this.#drawToggles(),
      unexpected: () => this.#drawToggles(),
      status: () => this.#drawStatus(true),
      table: () => this.#drawTable(),
      detail: () => this.#drawDetail(),
      prints: () => this.#drawPrints(),
      edit: () => this.#drawKeep(),
    };
    const onLost = () => {
      this.lost = true;
      this.#drawStatus();
    };
    for (const [name, action] of Object.entries(draw)) this.model.on(`change:${name}`, action);
    this.model.on("comm_live_update", onLost);
    this.endTheme = watchTheme(() => this.#drawTheme());
    this.rows.addEventListener("click", (event) => this.#clicked(event));
    this.rows.addEventListener("keydown", (event) => this.#pressed(event));
    // a notebook takes letters for commands before its outputs meet them: what is typed here stays here
    const typed = (event) => {
      if (!this.root.contains(event.target) || !event.target.matches?.("input, select")) return;
      event.stopPropagation();
      if (event.key === "Escape") event.target.value = event.target.defaultValue;
      if (["Enter", "Escape"].includes(event.key)) event.target.blur();
    };
    window.addEventListener("keydown", typed, true);
    this.end = () => {
      for (const [name, action] of Object.entries(draw)) this.model.off(`change:${name}`, action);
      this.model.off("comm_live_update", onLost);
      window.removeEventListener("keydown", typed, true);
      this.endTheme();
      this.now.end();
      clearTimeout(this.unheard);
      this.seen.disconnect();
      this.charts?.end();
      this.float.remove();
      this.twin.remove();
    };
  }

  #drawAll() {
    this.#drawTheme();
    this.#drawToggles();
    this.#drawStatus();
    this.#drawTable();
    this.#drawDetail();
    this.#drawPrints();
    this.#drawKeep();
  }

  #drawTheme() {
    for (const box of [this.root, this.float]) box.dataset.theme = isDark() ? "dark" : "light";
    this.charts?.draw();
  }

  // -- toggles -----------------------------------------------------------------------------------------------------

  #drawToggles() {
    const toggles = this.model.get("toggles");
    const focused = document.activeElement?.closest?.("[data-toggle]")?.dataset.toggle;
    const open = (kind) => this.toggles.querySelector(`details.${kind}`)?.open ?? false;
    const [moreOpen, fixedOpen] = [open("gp-more"), open("gp-fixed")];
    this.toggles.replaceChildren();
    const able = toggles.filter((t) => !t.reason);
    const folded = able.filter((t) => t.folded);
    const fixed = toggles.filter((t) => t.reason);
    const why = this.model.get("unexpected");
    if (why) element("div", "gp-quiet", this.toggles, why);
    for (const toggle of able) if (!toggle.folded) this.#drawToggle(toggle, this.toggles);
    if (folded.length) {
      const box = element("details", "gp-more", this.toggles);
      box.open = moreOpen;
      element("summary", "gp-quiet", box, settings(folded.length, "more "));
      for (const toggle of folded) this.#drawToggle(toggle, box);
    }
    if (fixed.length) this.#drawFixed(fixed, fixedOpen, able.length > 0);
    const chosen = toggles.filter((t) => t.value !== null);
    if (!this.running) this.each.disabled = chosen.length < 2;
    this.each.hidden = !able.length;
    this.reset.disabled = !chosen.length || this.running;
    this.run.textContent = chosen.length ? "Run" : "Run the baseline";
    this.run.title = chosen.length ? "Measure these settings against the baseline: adds a row" : "Measure the cell as it is";
    if (focused) this.toggles.querySelector(`[data-toggle="${focused}"] input, [data-toggle="${focused}"] select`)?.focus();
  }

  #drawToggle(toggle, parent) {
    const line = element("div", "gp-toggle", parent);
    line.dataset.toggle = toggle.name;
    line.toggleAttribute("data-changed", toggle.value !== null);
    const label = element("label", "gp-name", line);
    const words = element("span", "", label, toggle.title);
    words.title = toggle.help;
    this.#control(toggle, label);
    element("span", "gp-quiet", line, toggle.value === null ? "" : `baseline: ${toggle.shown}`);
    this.#expected(toggle, line);
    if (toggle.lesson) {
      const link = element("a", "gp-quiet", line, "lesson");
      link.href = toggle.lesson;
      link.target = "_blank";
    }
    const said = toggle.problem || toggle.cautions.join("; ");
    if (said) element("div", toggle.problem ? "gp-bad" : "gp-caution", line, said);
  }

  #control(toggle, label) {
    const value = toggle.value ?? toggle.current;
    const input = element(toggle.kind === "choice" ? "select" : "input", "", label);
    if (toggle.kind === "switch") {
      input.type = "checkbox";
      input.checked = value === true;
      input.indeterminate = value === null;
      input.addEventListener("change", () => this.#choose(toggle, input.checked));
    } else if (toggle.kind === "number") {
      input.type = "number";
      input.min = toggle.least;
      input.max = toggle.most;
      input.value = value;
      input.addEventListener("change", () => input.value !== "" && this.#choose(toggle, Math.round(Number(input.value))));
    } else {
      const options = value === null ? [{ value: null, words: "baseline" }, ...toggle.options] : toggle.options;
      options.forEach((option, i) => {
        const choice = element("option", "", input, option.words);
        choice.value = i;
        choice.selected = option.value === value;
      });
      input.addEventListener("change", () => this.#choose(toggle, options[input.value].value));
    }
    input.disabled = this.running || this.lost;
  }

  #expected(toggle, line) {
    if (!toggle.expected) return;
    const button = element("button", "gp-expected", line, `→ ${toggle.proposed}: ${toggle.expected}`);
    button.type = "button";
    button.title = "Predicted from the last run, not measured. Click to set this value";
    button.disabled = this.running || this.lost;
    button.addEventListener("click", () => this.#choose(toggle, toggle.proposal));
  }

  #drawFixed(fixed, open, others) {
    const box = element("details", "gp-fixed", this.toggles);
    box.open = open || !others;
    element("summary", "gp-quiet", box, `${settings(fixed.length, others ? "more " : "")} ${fixed.length > 1 ? "do" : "does"} not apply here`);
    for (const { title, reason } of fixed) {
      const line = element("div", "gp-quiet", box);
      element("b", "", line, title);
      line.append(`: ${reason}`);
    }
  }

  #choose(toggle, value) {
    const settings = settingsOf(this.model.get("toggles"));
    if (value === null || value === toggle.current) delete settings[toggle.name];
    else settings[toggle.name] = value;
    this.#send("choose", { settings });
  }

  // -- what runs ---------------------------------------------------------------------------------------------------

  get running() {
    return this.model.get("status").running;
  }

  #setRunning(running) {
    for (const button of [this.run, this.each, this.climb]) button.disabled = running;
  }

  #drawStatus(fresh = false) {
    clearTimeout(this.unheard);
    const { running, message, level } = this.model.get("status");
    const dead = this.lost;
    this.#setRunning(running || dead);
    this.close.disabled = dead;
    this.now.draw(fresh, dead);
    this.message.textContent = dead ? LOST : message;
    this.message.dataset.level = dead ? "bad" : level;
    this.#place();
    this.#drawToggles();
  }

  // -- the table ---------------------------------------------------------------------------------------------------

  #drawTable() {
    const at = document.activeElement?.closest?.("tr[data-row]")?.dataset.row;
    this.rows.innerHTML = this.model.get("table");
    this.#order();
    if (at) this.rows.querySelector(`tr[data-row="${CSS.escape(at)}"]`)?.focus();
  }

  #order() {
    for (const body of this.rows.querySelectorAll("tbody")) body.append(...order([...body.children], this.sort));
    for (const head of this.rows.querySelectorAll("th[aria-sort]")) {
      const by = head.querySelector("button").dataset.sort;
      const now = by !== this.sort.by ? "none" : this.sort.descending ? "descending" : "ascending";
      head.setAttribute("aria-sort", now);
    }
  }

  #clicked(event) {
    const sort = event.target.closest("[data-sort]");
    if (sort) {
      const by = sort.dataset.sort;
      const first = by === "speed"; // the fastest first
      if (this.sort.by !== by) this.sort = { by, descending: first };
      else this.sort = this.sort.descending === first ? { by, descending: !first } : { by: "number", descending: false };
      this.#order();
      return;
    }
    const row = event.target.closest("tr[data-row]");
    if (!row) return;
    const action = event.target.closest("[data-do]");
    if (action) this.#act(action.dataset.do, row);
    else if (!event.target.closest(".gp-menu")) this.#select(row.dataset.row);
  }

  #act(what, row) {
    row.querySelector(".gp-menu").open = false;
    if (what === "rename") return this.#rename(row);
    if (["decide", "again", "remove"].includes(what) && (this.running || this.lost)) return;
    if (["decide", "again"].includes(what)) this.#begin(what, { row: row.dataset.row });
    else this.#send(what, { row: row.dataset.row });
  }

  #rename(row) {
    const name = row.querySelector(".gp-setting b");
    const input = element("input", "gp-rename", null);
    input.value = input.defaultValue = name.textContent;
    input.setAttribute("aria-label", "Row name");
    name.replaceWith(input);
    input.focus();
    input.select();
    input.addEventListener("click", (event) => event.stopPropagation());
    input.addEventListener("blur", () => {
      if (input.value === input.defaultValue) this.#drawTable();
      else this.#send("rename", { row: row.dataset.row, name: input.value });
    });
  }

  #pressed(event) {
    const row = event.target.closest("tr[data-row]");
    const menu = event.target.closest(".gp-menu[open]");
    if (menu && event.key === "Escape") menu.open = false;
    if (!row || event.target !== row) return;
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) row[step]?.focus();
    else if (event.key === "Enter" || event.key === " ") this.#select(row.dataset.row);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #select(id) {
    const marks = chosenRows(this.model.get("marks"), id);
    this.model.set("marks", marks);
    for (const row of this.rows.querySelectorAll("tr[data-row]")) {
      row.setAttribute("aria-selected", String(marks.includes(row.dataset.row)));
    }
    if (marks.length && this.running) this.detail.textContent = "Opens when the run ends.";
    this.#send("open", { rows: marks });
  }

  // -- one run, or two side by side --------------------------------------------------------------------------------

  #drawDetail() {
    this.charts?.end();
    this.detail.innerHTML = this.model.get("detail");
    this.charts = drawCharts(this.detail, this.model.get("charts"));
  }

  #drawPrints() {
    this.prints.innerHTML = this.model.get("prints");
  }

  #drawKeep() {
    const { title, html, text, cell, row, texts } = this.model.get("edit");
    this.keep.replaceChildren();
    if (!text) return;
    const head = element("div", "gp-buttons", this.keep);
    element("b", "", head, title);
    const note = element("span", "gp-quiet", null);
    if (cell && texts.length) {
      this.#button(head, "Apply to the cell", "Change the cell in this notebook; undo with Ctrl-Z in it", () => {
        const done = applyToCell(this.model.widget_manager, texts, cell);
        note.textContent = APPLY_NOTES[done];
        if (done !== "applied") return;
        this.#send(done, { row });
        this.root.scrollIntoView({ block: "nearest" }); // what it says of it stands at the top
      });
    }
    this.#button(head, "Copy", cell ? "Copy the changed cell" : "Copy the edit", async () => {
      note.textContent = (await copied(cell || text)) ? "Copied." : "Select the text below and copy it.";
    });
    head.append(note);
    element("div", "", this.keep).innerHTML = html;
  }
}

const settings = (count, more) => `${count} ${more}setting${count > 1 ? "s" : ""}`;

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

export default {
  render({ model, el }) {
    const bench = new Bench(model, el);
    return () => bench.end();
  },
};
