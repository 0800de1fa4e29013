import assert from "node:assert/strict";
import test from "node:test";
import { cappedAxis } from "../src/axis.js";

test("one outlier does not flatten an axis, and is told", () => {
  const axis = cappedAxis([...Array(99).fill(10), 900]);
  assert.ok(axis.top >= 30 && axis.top < 900);
  assert.equal(axis.above, 1);
  assert.equal(axis.largest, 900);
});

test("without an outlier nothing leaves the axis", () => {
  const values = Array.from({ length: 100 }, (_, i) => 100 + i);
  const axis = cappedAxis(values);
  assert.equal(axis.above, 0);
  assert.ok(axis.top >= 199);
});
