// The boundary with Python: a small JSON head and float32 buffers. gpulab/views/live_view.py writes what this reads.

export const VERSION = 2;

function floats(buffer) {
  if (buffer instanceof ArrayBuffer) return new Float32Array(buffer);
  // a DataView may start at any byte, a Float32Array only at multiples of four
  return new Float32Array(buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength));
}

/** Returns {status, series, steps, samples, ended}, steps as rows of [end_s, wall_ms, wait_ms, samples_per_s]; null for a message of another version. */
export function decode(head, buffers) {
  if (!head || head.v !== VERSION) return null;
  const [steps, ...rest] = buffers.map(floats);
  return {
    status: head.status,
    series: head.series,
    steps: steps ?? new Float32Array(0),
    samples: head.samples.map((name, i) => ({ name, rows: rest[i] })),
    ended: head.ended === true,
  };
}
