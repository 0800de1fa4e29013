// Stop: asks the kernel on its control channel, which it serves also while a cell runs; else interrupts it.

export const STOP_TYPE = "gpulab_stop";
const PATIENCE_MS = 2000;
/** What its answers mean for the reader. */
export const STOP_NOTES = {
  heard: "Stopping at the end of this step …",
  over: "The run has already ended.",
  interrupted: "The kernel did not respond, so it was interrupted.",
  unreachable: "The kernel is not reachable from here: use the notebook's stop button.",
};

function controlMessage(kernel, key) {
  return {
    channel: "control",
    header: {
      msg_id: crypto.randomUUID?.() ?? `gpulab-${Date.now()}-${Math.random().toString(16).slice(2)}`,
      msg_type: STOP_TYPE,
      username: kernel.username ?? "",
      session: kernel.clientId ?? "",
      date: new Date().toISOString(),
      version: "5.3",
    },
    parent_header: {},
    metadata: {},
    content: { run: key },
    buffers: [],
  };
}

async function within(ms, answer, otherwise) {
  let timer;
  const late = new Promise((resolve) => (timer = setTimeout(resolve, ms, otherwise)));
  try {
    return await Promise.race([answer, late]);
  } finally {
    clearTimeout(timer);
  }
}

async function asked(kernel, key, patience) {
  let future = null;
  const reply = new Promise((resolve) => {
    try {
      future = kernel.sendControlMessage(controlMessage(kernel, key), true, true);
      future.onReply = (message) => resolve(message.content?.status === "ok" ? "heard" : "over");
      future.done.catch(() => {}); // disposed below, or the kernel went away: the patience decides
    } catch {
      resolve(null);
    }
  });
  const answer = await within(patience, reply, null);
  if (answer === null) future?.dispose();
  return answer;
}

async function interrupted(kernel) {
  try {
    await kernel.interrupt();
    return "interrupted";
  } catch {
    return "unreachable";
  }
}

/**
 * Ends the run `key`. Returns "heard" (it ends at the next step boundary), "over" (it had ended already),
 * "interrupted" or "unreachable". `viaComm` asks on the shell channel, all that some front ends offer, and resolves
 * to true once the run says that it was heard.
 */
export async function stopRun(kernel, key, viaComm, patience = PATIENCE_MS) {
  if (typeof kernel?.sendControlMessage === "function") {
    const answer = await asked(kernel, key, patience);
    if (answer !== null) return answer;
  } else if (await within(patience, viaComm(), false)) {
    return "heard";
  }
  return typeof kernel?.interrupt === "function" ? interrupted(kernel) : "unreachable";
}
