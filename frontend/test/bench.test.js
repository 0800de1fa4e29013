import assert from "node:assert/strict";
import { test } from "node:test";

import { APPLY_NOTES, applyToCell, replaced } from "../src/apply.js";
import { chosenRows, order, settingsOf } from "../src/bench_state.js";

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
