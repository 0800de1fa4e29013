import assert from "node:assert/strict";
import test from "node:test";
import { Store } from "../src/store.js";

function model(history) {
  const heard = new Map();
  return {
    heard,
    get: (name) => (name === "history" ? history : "key"),
    on: (name, callback) => heard.set(name, callback),
    off: (name) => heard.delete(name),
    fire: (name, ...rest) => heard.get(name)?.(...rest),
  };
}

const status = { phase: "measuring", step: 3, total: null, total_of: "run", elapsed_s: 1, stop_requested: false };
const head = (more = {}) => ({ v: 1, status, samples: [], ...more });
const noSteps = [new DataView(new ArrayBuffer(0))];

test("a run whose kernel is gone is lost and cannot be stopped", () => {
  const widget = model({});
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
  const widget = model({});
  const store = new Store(widget);
  widget.fire("msg:custom", head({ ended: true }), noSteps);
  widget.fire("comm_live_update");
  assert.equal(store.lost, false);
  assert.equal(store.ended, true);
});
