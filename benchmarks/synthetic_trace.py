"""A made-up trace of any size in Kineto's own layout, so that reading can be measured beyond what anybody has recorded.

    python -m benchmarks.synthetic_trace 500000 trace.json.gz

Per operator: two nested cpu_op, a launch, its kernel, and the two ends of the arrow between them, with the arguments
that torch 2.x writes. Steps, DataLoader and optimizer marks, copies and memory events come in between.
"""

from __future__ import annotations

import argparse
import gzip
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

OPERATORS_PER_STEP = 2000
EVENTS_PER_OPERATOR = 6
BASE_US = 1_419_116_104_654
_HEAD = """
{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936,
      "computeMajor": 9, "computeMinor": 0,
      "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048,
      "regsPerBlock": 65536, "warpSize": 32,
      "sharedMemPerBlock": 49152, "numSms": 132
    , "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472
    }
  ],
  "cuda_runtime_version": 12040,
  "record_shapes": 1,
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1751410836000000000,
  "traceEvents": [
"""
_TAIL = """
  {
    "name": "process_name", "ph": "M", "ts": 1419116104654.000, "pid": 4242, "tid": 0,
    "args": {
      "name": "python3"
    }
  },
  {
    "name": "Record Window End", "ph": "i", "s": "g",
    "pid": "", "tid": "", "ts": 1419116104654.000
  }
  ],
  "traceName": "tests.support.synthetic.json"
}
"""
_OUTER = """  {{
    "ph": "X", "cat": "cpu_op", "name": "aten::{name}", "pid": 4242, "tid": 4242,
    "ts": {ts:.3f}, "dur": 18.412,
    "args": {{
      "External id": {n},"Record function id": 0, {inputs}, "Ev Idx": {n}
    }}
  }},
"""
_INNER = """  {{
    "ph": "X", "cat": "cpu_op", "name": "aten::{name}_out", "pid": 4242, "tid": 4242,
    "ts": {ts:.3f}, "dur": 14.117,
    "args": {{
      "External id": {n},"Record function id": 0, {inputs}, "Ev Idx": {n}
    }}
  }},
"""
_LAUNCH = """  {{
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4242, "tid": 4242,
    "ts": {ts:.3f}, "dur": 6.005,
    "args": {{
      "External id": {n}, "cbid": 211, "correlation": {n}
    }}
  }},
"""
_KERNEL = """  {{
    "ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},
    "ts": {ts:.3f}, "dur": 9.216,
    "args": {{
      "External id": {n},
      "queued": 0, "device": 0, "context": 1,
      "stream": {stream}, "correlation": {n},
      "registers per thread": 32,
      "shared memory": 0,
      "blocks per SM": 3.878788,
      "warps per SM": 15.515152,
      "grid": [512, 1, 1],
      "block": [128, 1, 1],
      "est. achieved occupancy %": 24
    }}
  }},
"""
_FLOWS = """  {{
    "ph": "s", "id": {n}, "pid": 4242, "tid": 4242, "ts": {ts:.3f},
    "cat": "ac2g", "name": "ac2g"
  }},
  {{
    "ph": "f", "id": {n}, "pid": 0, "tid": {stream}, "ts": {ts:.3f},
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }},
"""
_MARK = """  {{
    "ph": "X", "cat": "user_annotation", "name": "{name}", "pid": 4242, "tid": 4242,
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      "External id": {n},"Record function id": 0, "Ev Idx": {n}
    }}
  }},
"""
_OUTER_INPUTS = (
    '"Concrete Inputs": ["", "", "", "1"], "Input type": ["float", "float", "float", "Scalar"], '
    '"Input Strides": [[1024, 1], [1024, 1], [1024], []], "Input Dims": [[64, 1024], [1024, 1024], [1024], []]'
)
_INNER_INPUTS = '"Input type": ["float", "float"], "Input Dims": [[64, 1024], [1024, 1024]]'
_KERNEL_NAME = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::{0}_functor<float>, std::array<char*, 3ul> >"
    "(int, at::native::{0}_functor<float>, std::array<char*, 3ul>)"
)
_NAMES = ("addmm", "add_", "mul", "native_layer_norm", "gelu", "softmax", "copy_", "cat", "native_dropout", "div")


def write(path: Path, events: int) -> int:
    """Write about `events` events (gzipped where the name ends in .gz); returns how many it wrote exactly."""
    with _opened(path) as file:
        file.write(_HEAD)
        written = 2
        for count, text in _operators(max(1, events // EVENTS_PER_OPERATOR)):
            file.write(text)
            written += count
        file.write(_TAIL)
    return written


def _operators(total: int) -> Iterator[tuple[int, str]]:
    """(events, text) of one operator after the other, each 20 µs after the one before."""
    for n in range(1, total + 1):
        ts, name, stream = BASE_US + 20.0 * n + 0.001 * (n % 997), _NAMES[n % len(_NAMES)], 7 if n % 50 else 20
        text = (
            _OUTER.format(name=name, ts=ts, n=n, inputs=_OUTER_INPUTS)
            + _INNER.format(name=name, ts=ts + 2.2, n=n, inputs=_INNER_INPUTS)
            + _LAUNCH.format(ts=ts + 5.125, n=n)
            + _KERNEL.format(name=_KERNEL_NAME.format(name), ts=ts + 12.75, n=n, stream=stream)
            + _FLOWS.format(ts=ts + 12.75, n=n, stream=stream)
        )
        count = EVENTS_PER_OPERATOR
        if n % OPERATORS_PER_STEP == 1:
            text = _marks(n, ts, min(OPERATORS_PER_STEP, total - n + 1)) + text
            count += 3
        yield count, text


def _marks(n: int, ts: float, operators: int) -> str:
    """The step's own mark, its fetch at the start, its update at the end."""
    wall = 20.0 * operators
    return (
        _MARK.format(name=f"ProfilerStep#{n // OPERATORS_PER_STEP}", ts=ts, dur=wall - 1.1, n=n)
        + _MARK.format(
            name="enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", ts=ts + 0.3, dur=wall * 0.2, n=n
        )
        + _MARK.format(name="Optimizer.step#AdamW.step", ts=ts + wall * 0.9, dur=wall * 0.08, n=n)
    )


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "wb", compresslevel=1), encoding="utf-8")
    return path.open("w", encoding="utf-8")


def main() -> None:
    """Write one trace from the command line."""
    parser = argparse.ArgumentParser(prog="synthetic_trace", description="Write a made-up PyTorch trace.")
    parser.add_argument("events", type=int)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    print(f"{write(options.path, options.events):,} events in {options.path}")


if __name__ == "__main__":
    main()
