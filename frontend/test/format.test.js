import assert from "node:assert/strict";
import test from "node:test";
import { elapsed, figure, horizon, progress } from "../src/format.js";

test("elapsed time", () => {
  assert.deepEqual([0, 9.9, 61, 3661].map(elapsed), ["0:00", "0:09", "1:01", "1:01:01"]);
});

test("figures have three digits", () => {
  assert.deepEqual([0, 0.1234, 1.234, 12.34, 123.4, 1234567, null, NaN].map(figure), [
    "0.00", "0.123", "1.23", "12.3", "123", "1,234,567", "–", "–",
  ]);
});

test("progress names what the total counts", () => {
  assert.deepEqual(progress({ step: 12, total: 113, total_of: "epoch" }), {
    text: "step 12 of at most 113 (one epoch)",
    fraction: 12 / 113,
  });
  assert.equal(progress({ step: 12, total: 40, total_of: "run" }).text, "step 12 of 40");
  assert.deepEqual(progress({ step: 12, total: null, total_of: "" }), { text: "step 12", fraction: null });
  assert.equal(progress({ step: 0, total: 113, total_of: "epoch" }).text, "before the first step");
  assert.deepEqual(progress({ step: 226, total: 113, total_of: "epoch" }), {
    text: "step 226 · epoch 2, step 113 of 113",
    fraction: 1,
  });
});

test("the time axis ends at a round time not before now", () => {
  assert.deepEqual([0, 5, 5.1, 31, 4000].map(horizon), [5, 5, 10, 40, 4000]);
});
