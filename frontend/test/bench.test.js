import assert from "node:assert/strict";
import { test } from "node:test";

import { APPLY_NOTES, applyToCell, replaced } from "../src/apply.js";
import { chosenRows, order, readout, settingsOf, sums } from "../src/bench_state.js";
import { figure } from "../src/format.js";

test("settings are the toggles that were turned", () => {
  const toggles = [{ name: "workers", value: 2 }, { name: "amp", value: null }, { name: "fused", value: false }];
  assert.deepEqual(settingsOf(toggles), { workers: 2, fused: false });
});

test("one click opens a row, two make A and B, a third begins anew", () => {
  let marks = [];
  for (const [id, expected] of [["a", ["a"]], ["b", ["a", "b"]], ["c", ["c"]], ["a", ["c", "a"]], ["c", ["a"]], ["a", []]]) {
    marks = chosenRows(marks, id);
    assert.deepEqual(marks, expected);
  }
});

const row = (number, setting, speed) => ({
  id: setting,
  getAttribute: (name) => ({ "data-by-number": number, "data-by-setting": setting, "data-by-speed": speed })[name],
});

test("rows are sorted as numbers, equal ones as they came", () => {
  const rows = [row("0", "baseline", "1.0"), row("1", "workers=2", "0.5"), row("2", "amp", "0.5"), row("3", "x", "10.0")];
  const ids = (sort) => order(rows, sort).map((r) => r.id);
  assert.deepEqual(ids({ by: "speed", descending: false }), ["workers=2", "amp", "baseline", "x"]);
  assert.deepEqual(ids({ by: "speed", descending: true }), ["x", "baseline", "workers=2", "amp"]);
  assert.deepEqual(ids({ by: "setting", descending: false }), ["amp", "baseline", "workers=2", "x"]);
});

test("an edit takes the place of the cell's text and keeps its magic", () => {
  const before = "loader = f(0)\ntrain()\n";
  const after = "loader = f(2)\ntrain()\n";
  assert.equal(replaced(`%%gpuprofile --steps 9\n${before}`, before, after), `%%gpuprofile --steps 9\n${after}`);
  assert.equal(replaced(before, before, after), after);
  for (const other of ["x = 1", `import os\n${before}`, `${before}more()`, ""]) assert.equal(replaced(other, before, after), null);
  assert.equal(replaced("x", "", "y"), null);
});

test("the cell of the notebook is changed, again after that, and nothing where it was changed by hand", () => {
  const sources = ["import torch", "%%gpuprofile\na = 0"];
  const cells = sources.map((_, i) => ({ sharedModel: { getSource: () => sources[i], setSource: (s) => (sources[i] = s) } }));
  const manager = { context: { model: { cells: { length: 2, get: (i) => cells[i] } } } };
  assert.equal(applyToCell(manager, ["a = 0"], "a = 1"), "applied");
  assert.deepEqual(sources, ["import torch", "%%gpuprofile\na = 1"]);
  assert.equal(applyToCell(manager, ["a = 1", "a = 0"], "a = 2"), "applied");
  assert.equal(applyToCell(manager, ["a = 1", "a = 2"], "a = 3"), "applied", "the first edit was undone, or never told");
  sources[1] += " + 1";
  assert.equal(applyToCell(manager, ["a = 3", "a = 2"], "a = 4"), "changed");
  assert.deepEqual(sources, ["import torch", "%%gpuprofile\na = 3 + 1"]);
  assert.equal(applyToCell(undefined, ["a = 3 + 1"], "a = 4"), "unreachable");
  for (const came of ["applied", "changed", "unreachable"]) assert.ok(APPLY_NOTES[came]);
});

test("what stands on each other is drawn as sums, and told as parts of a step", () => {
  const lines = [{ label: "wait", x: [0, 1, 2], y: [3, 4, 0] }, { label: "rest", x: [0, 1, 2], y: [1, 2, 0] }];
  assert.deepEqual(sums(lines).map(({ label, y }) => [label, y]), [["rest", [4, 6, 0]], ["wait", [3, 4, 0]]]);
  const chart = { lines, unit: "ms", xUnit: "s", stacked: true };
  assert.equal(readout(chart, 1.5, figure), "at 1.50 s: step 6.00 ms (wait 4.00 ms, rest 2.00 ms)");
  assert.equal(readout(chart, 3, figure), "at 3.00 s: no step", "the other run goes on");
});

test("a line that is broken or has ended says nothing", () => {
  const lines = [{ label: "A", x: [0, 2, 4], y: [1, null, 3] }, { label: "B", x: [0, 3], y: [5, 6] }];
  const said = (x) => readout({ lines, unit: "%", xUnit: "s", stacked: false }, x, figure);
  assert.equal(said(1), "at 1.00 s: A 1.00 %, B 5.00 %");
  assert.equal(said(2.5), "at 2.50 s: B 5.00 %");
  assert.equal(said(4), "at 4.00 s: A 3.00 %");
  assert.equal(said(5), "");
});
