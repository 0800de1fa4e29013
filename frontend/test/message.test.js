import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { decode, VERSION } from "../src/message.js";

const golden = JSON.parse(readFileSync(new URL("../../tests/golden/live_message.json", import.meta.url)));

// a DataView into a larger buffer at an odd offset, as a front end may hand it over
function misaligned(base64) {
  const bytes = Buffer.from(base64, "base64");
  const larger = new Uint8Array(bytes.length + 3);
  larger.set(bytes, 3);
  return new DataView(larger.buffer, 3, bytes.length);
}

function rows(floats, columns) {
  const list = Array.from(floats, (x) => (Number.isNaN(x) ? null : x));
  return Array.from({ length: list.length / columns }, (_, i) => list.slice(i * columns, (i + 1) * columns));
}

test("the message that Python writes is the message that is read here", () => {
  const delta = decode(golden.head, golden.buffers.map(misaligned));
  assert.deepEqual(rows(delta.steps, 4), golden.steps);
  assert.deepEqual(
    delta.samples.map(({ name, rows: floats }) => [name, rows(floats, 2)]),
    golden.samples,
  );
  assert.equal(delta.status.total_of, "epoch");
  assert.equal(delta.series[0].source, "psutil");
  assert.equal(delta.ended, false);
});

test("a message of another version is ignored", () => {
  assert.equal(decode({ ...golden.head, v: VERSION + 1 }, []), null);
  assert.equal(decode({ kind: "something else" }, []), null);
});
