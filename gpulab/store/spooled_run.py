"""A run as its process spools it while it goes on, so that a reader can finish it where the process was killed.

`steps` and `readings` are its columns so far. `sketch` is text: the document of a run without columns, written again
whenever more of it is known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gpulab.run import Int64, Missing, Run, Samples, Series, StepFlag, Steps
from gpulab.store import run_format
from gpulab.store.spool import Spool, Spooled, Table

STEPS, READINGS, SKETCH, ARRIVALS = "steps", "readings", "sketch", "arrivals"
STEP_COLUMNS = (
    *("start_ns", "end_ns", "data_wait_ns", "optimizer_ns", "own_ns", "batches"),
    *("samples", "phase", "flags"),  # samples: -1: unknown
)
STEP = np.dtype([(name, np.int64) for name in STEP_COLUMNS])
READING = np.dtype([("series", np.int64), ("t_ns", np.int64), ("value", np.float64)])  # the mean of about a second
# at a collective: of which group, the number in it, and when by the system's clock
ARRIVAL = np.dtype([("group", np.int64), ("sequence", np.int64), ("time_ns", np.int64)])
TABLES: dict[str, np.dtype[np.void]] = {
    STEPS: STEP,
    READINGS: READING,
    SKETCH: np.dtype([("byte", np.uint8)]),
    ARRIVALS: ARRIVAL,  # the latest, for who looks while the run goes on
}
Arrivals = npt.NDArray[np.void]

KILLED = "its process was killed"


def steps_of(columns: Int64, origin_ns: int) -> Steps:
    """Steps from `STEP_COLUMNS`, [9, n], on a clock that starts at `origin_ns`."""
    column = dict(zip(STEP_COLUMNS, columns, strict=True))
    start, end = column["start_ns"] - origin_ns, column["end_ns"] - origin_ns
    wall = end - start
    wait = np.minimum(column["data_wait_ns"], wall)
    return Steps(
        number=np.arange(1, len(start) + 1, dtype=np.int64),
        start_ns=start,
        end_ns=end,
        data_wait_ns=wait,
        optimizer_ns=np.minimum(column["optimizer_ns"], wall),
        batch_count=column["batches"].copy(),
        sample_count=column["samples"].copy(),
        phase=column["phase"].astype(np.uint8),
        flags=column["flags"].astype(np.uint8),
        own_ns=np.minimum(column["own_ns"], wall - wait),
    )


def write_sketch(spool: Spool, run: Run) -> None:
    """What is known of the run by now; its columns are left out. Raises OSError."""
    text = run_format.encode_header(run)
    spool.append(SKETCH, 0, text, len(text))


def finished(spooled: Spooled) -> Run:
    """The run up to its last second, `interrupted`. Raises StoreError where too little of it was written."""
    sketch = run_format.decode_header(spooled.tables[SKETCH].tobytes())
    table = spooled.tables[STEPS].view(np.int64).reshape(-1, len(STEP_COLUMNS)).copy()
    if len(table):
        table[0, -1] |= int(StepFlag.FIRST)
        table[-1, -1] |= int(StepFlag.LAST)
    steps = steps_of(np.ascontiguousarray(table.T), int(spooled.about["origin_ns"]))
    readings = spooled.tables[READINGS]
    samples = Samples(tuple(_series(s, readings, i) for i, s in enumerate(sketch.samples.series)))
    ends_ns = [sketch.wall_ns, *steps.end_ns[-1:].tolist(), *readings["t_ns"][-1:].tolist()]
    unknown = "measurements are kept up to its last second, but no trace"
    missing = Missing("step breakdown and kernels", f"{KILLED}: {unknown}", key="breakdown")
    return replace(
        sketch,
        steps=steps,
        samples=samples,
        wall_ns=max(ends_ns),
        outcome="interrupted",
        outcome_detail=KILLED,
        step_source=sketch.step_source if len(steps) else "whole cell",
        missing=(*sketch.missing, missing),
    )


def _series(series: Series, readings: Table, number: int) -> Series:
    own = readings[readings["series"] == number]
    t_ns: npt.NDArray[np.int64] = own["t_ns"].copy()
    return replace(series, t_ns=t_ns, value=own["value"].copy())
