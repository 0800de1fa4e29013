import assert from "node:assert/strict";
import test from "node:test";
import { Curve, StepHistory } from "../src/history.js";

const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-6 * Math.max(1, Math.abs(b)), `${a} is not ${b}`);
const sum = (values) => values.reduce((a, b) => a + b, 0);

test("many steps stay few points, and no time, sample or slowest step is lost", () => {
  const history = new StepHistory(64);
  const n = 10_007;
  let [wall, wait] = [0, 0];
  for (let i = 0; i < n; i++) {
    const ms = i === 4_321 ? 900 : 1 + (i % 7) / 10;
    wall += ms;
    wait += ms / 4;
    history.push(i / 100, ms, ms / 4, 32_000 / ms);
  }
  assert.ok(history.length < 64);
  assert.equal(sum(history.count), n);
  close(sum(history.wall.map((ms, i) => ms * history.count[i])), wall);
  close(sum(history.wait.map((ms, i) => ms * history.count[i])), wait);
  close(sum(history.samples), 32 * n);
  assert.equal(Math.max(...history.slowest), 900);
  assert.equal(history.end[history.length - 1], (n - 1) / 100);
  assert.ok(history.end.every((t, i) => i === 0 || t > history.end[i - 1]));
});

test("throughput is samples over the time of the last steps", () => {
  const history = new StepHistory();
  assert.equal(history.throughput(), null);
  history.push(1, 1000, 0, 1); // long ago, slow
  for (let i = 0; i < 100; i++) history.push(10 + i / 20, 50, 5, 1280);
  const { value, unit } = history.throughput();
  assert.equal(unit, "samples/s");
  close(value, 1280);
  assert.ok(history.recent.length < 70, "what is no longer recent is forgotten");
});

test("unknown samples per step: steps are counted", () => {
  const history = new StepHistory();
  for (let i = 0; i < 10; i++) history.push(i / 20, 50, 5, NaN);
  assert.deepEqual(history.throughput(), { value: 20, unit: "steps/s" });
  close(history.rates()[3], 20);
});

test("a curve keeps its mean in bounded memory", () => {
  const curve = new Curve(64);
  for (let i = 0; i < 10_000; i++) curve.push(i / 10, i % 100);
  assert.ok(curve.t.length < 64);
  const weighted = sum(curve.value.map((v, i) => v * curve.count[i])) / sum(curve.count);
  close(weighted, 49.5);
});

test("a silent meter leaves a gap, and a reading that is no number is no reading", () => {
  const curve = new Curve();
  curve.push(0, 5);
  curve.push(0.2, NaN);
  curve.push(0.4, 6);
  curve.push(9, 7);
  assert.deepEqual(curve.value, [5, 6, null, 7]);
  assert.equal(curve.last, 7);
});

test("a meter that is silent between all its readings stays few points", () => {
  const curve = new Curve(64);
  for (let i = 0; i < 10_000; i++) curve.push(3 * i, i % 100);
  assert.ok(curve.t.length < 64);
  assert.equal(curve.t[0], 0);
  assert.equal(curve.t[curve.t.length - 1], 3 * 9_999);
  assert.ok(curve.t.every((t, i) => i === 0 || t > curve.t[i - 1]));
});
