import assert from "node:assert/strict";
import test from "node:test";
import { Store } from "../src/store.js";

function model() {
  const heard = new Map();
  return {
    heard,
    get: () => "key",
    on: (name, callback) => heard.set(name, callback),
    off: (name) => heard.delete(name),
    fire: (name, ...rest) => heard.get(name)?.(...rest),
  };
}

const status = { phase: "measuring", step: 3, total: null, total_of: "run", elapsed_s: 1, stop_requested: false };
const head = (more = {}) => ({ v: 2, status, samples: [], series: [], ...more });
const noSteps = [new DataView(new ArrayBuffer(0))];

test("a run whose kernel is gone is lost and cannot be stopped", () => {
  const widget = model();
  const store = new Store(widget);
  widget.fire("msg:custom", head(), noSteps);
  assert.equal(store.canStop, true);
  widget.fire("comm_live_update");
  assert.equal(store.lost, true);
  assert.equal(store.canStop, false);
  store.close();
  assert.equal(widget.heard.size, 0);
});

test("a run that has ended is not lost when its widget is closed", () => {
  const widget = model();
  const store = new Store(widget);
  widget.fire("msg:custom", head({ ended: true }), noSteps);
  widget.fire("comm_live_update");
  assert.equal(store.lost, false);
  assert.equal(store.ended, true);
});

test("a stop that no step follows says what ends it", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  const widget = model();
  const store = new Store(widget);
  widget.fire("msg:custom", head({ status: { ...status, step: 0, stop_requested: true } }), noSteps);
  assert.match(store.stopNote, /end of this step/);
  context.mock.timers.tick(4000);
  assert.match(store.stopNote, /interrupt the kernel/);
  widget.fire("msg:custom", head({ ended: true }), noSteps);
  assert.equal(store.stopNote, "");
  store.close();
});

test("eight hours at 10 Hz stay few points, in a page that nobody looks at", () => {
  const widget = model();
  const store = new Store(widget);
  const n = 288_000;
  const each = 32; // steps in a message
  for (let first = 0; first < n; first += each) {
    const steps = new Float32Array(4 * each);
    const readings = new Float32Array(2 * each);
    for (let i = 0; i < each; i++) {
      const t = (first + i + 1) / 10;
      steps.set([t, first + i === 123_456 ? 900 : 100, 25, 320], 4 * i);
      readings.set([t, (first + i) % 100], 2 * i);
    }
    const buffers = [new DataView(steps.buffer), new DataView(readings.buffer)];
    widget.fire("msg:custom", head({ samples: ["power_w"] }), buffers);
  }
  const { steps } = store;
  const curve = store.curves.get("power_w");
  for (const times of [steps.end, curve.t]) {
    assert.ok(times.length > 1000 && times.length <= 4096, `${times.length} points`);
    assert.equal(times[0], Math.fround(0.1));
    assert.equal(times[times.length - 1], Math.fround(n / 10));
    assert.ok(times.every((t, i) => i === 0 || t > times[i - 1]), "in order");
  }
  assert.ok(steps.recent.length <= 16_384, `${steps.recent.length} recent rows`);
  assert.equal(steps.count.reduce((a, b) => a + b, 0), n, "no step is lost");
  assert.equal(Math.max(...steps.slowest), 900, "the slowest step is still there");
  assert.equal(store.phases.length, 1);
  assert.equal(steps.throughput().unit, "samples/s");
});
