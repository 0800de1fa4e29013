import assert from "node:assert/strict";
import test from "node:test";
import { Clock } from "../src/clock.js";
import { lasting } from "../src/format.js";
import { line } from "../src/running.js";

function clock(python = 0) {
  const time = { now: 1000 };
  const made = new Clock(() => time.now);
  const hear = (began, lag = 0, fresh = true) =>
    made.hear({ since_s: began + python, sent_s: time.now + python - lag }, fresh);
  return { time, made, hear };
}

test("the time goes on without Python, and a late message does not set it back", () => {
  const { time, made, hear } = clock();
  assert.equal(made.elapsed, null);
  hear(990);
  assert.equal(made.elapsed, 10);
  time.now += 7;
  assert.equal(made.elapsed, 17);
  hear(990.3, 5);
  assert.equal(made.elapsed, 17);
  made.hear({ since_s: null });
  assert.equal(made.elapsed, null);
});

test("a page that is opened again goes on where the time is, and a new run begins anew", () => {
  const { time, made, hear } = clock();
  hear(900, 60, false); // what the page begins with was sent a minute ago
  assert.equal(made.elapsed, 100);
  hear(900);
  assert.equal(made.elapsed, 100);
  time.now += 1;
  hear(1000.5);
  assert.equal(made.elapsed, 0.5);
});

test("Python's clock may be another one", () => {
  for (const python of [-300, 300]) {
    const { made, hear } = clock(python);
    hear(990, 1.5);
    assert.equal(made.elapsed, 8.5); // a message's own time is not known
    hear(990, 0.1);
    assert.ok(Math.abs(made.elapsed - 9.9) < 1e-9);
  }
});

test("the line has the time, and the bar follows it where it is known how long all takes", () => {
  const status = { words: "block 1: cache=on", rest: " of at most 60 s", whole_s: 60, fraction: 0.1 };
  assert.deepEqual(line(status, 15.4), { text: "block 1: cache=on · 15 s of at most 60 s", share: 15.4 / 60 });
  assert.deepEqual(line(status, 1).share, 0.1, "it never goes back");
  assert.deepEqual(line({ ...status, whole_s: null }, 90).share, 0.1);
  assert.deepEqual(line(status, null), { text: "block 1: cache=on", share: 0.1 });
});

test("a time reads as Python writes it", () => {
  assert.deepEqual([0, 0.4, 12.8, 119.9, 125, 7_260].map(lasting), [
    "0 s", "less than 1 s", "12 s", "119 s", "2 min 5 s", "2 h 1 min",
  ]);
});
