import assert from "node:assert/strict";
import test from "node:test";
import { STOP_TYPE, stopRun } from "../src/stop.js";

const never = () => new Promise(() => {});
const PATIENCE = 20; // ms, where nobody answers
const UNTIL_ANSWERED = 60_000;

function kernel({ answer, interrupt = async () => {} }) {
  const seen = { messages: [], interrupts: 0, disposed: 0 };
  return {
    seen,
    clientId: "client",
    sendControlMessage(message) {
      seen.messages.push(message);
      const future = { done: never(), dispose: () => seen.disposed++ };
      if (answer) setTimeout(() => future.onReply({ content: { status: answer } }), 1);
      return future;
    },
    async interrupt() {
      seen.interrupts++;
      return interrupt();
    },
  };
}

test("heard on the control channel, the run is not interrupted", async () => {
  const k = kernel({ answer: "ok" });
  assert.equal(await stopRun(k, "abc", never, UNTIL_ANSWERED), "heard");
  const [message] = k.seen.messages;
  assert.equal(message.channel, "control");
  assert.equal(message.header.msg_type, STOP_TYPE);
  assert.equal(message.header.session, "client");
  assert.deepEqual(message.content, { run: "abc" });
  assert.equal(k.seen.interrupts, 0);
});

test("a run that is over is left alone", async () => {
  const k = kernel({ answer: "error" });
  assert.equal(await stopRun(k, "abc", never, UNTIL_ANSWERED), "over");
  assert.equal(k.seen.interrupts, 0);
});

test("no answer: the kernel is interrupted, and the question withdrawn", async () => {
  const k = kernel({});
  assert.equal(await stopRun(k, "abc", never, PATIENCE), "interrupted");
  assert.deepEqual([k.seen.interrupts, k.seen.disposed], [1, 1]);
});

test("neither: the reader is told", async () => {
  const dead = async () => {
    throw new Error("gone");
  };
  assert.equal(await stopRun(kernel({ interrupt: dead }), "abc", never, PATIENCE), "unreachable");
  assert.equal(await stopRun(undefined, "abc", never, PATIENCE), "unreachable");
});

test("without a control channel the comm is asked", async () => {
  assert.equal(await stopRun({}, "abc", async () => true, PATIENCE), "heard");
  const k = { interrupt: async () => {} };
  assert.equal(await stopRun(k, "abc", never, PATIENCE), "interrupted");
});
