"""What a run writes while it goes on, and how to read it: whoever kills its process costs it no more than a second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gpulab.run import Int64, Run, Samples, Series, StepFlag, Steps
from gpulab.store.changed_rows import CHANGES, current
from gpulab.store.table_file import Table, Tables

STEPS, READINGS, ARRIVALS = "steps", "readings", "arrivals"
ORIGIN = "origin_ns"  # what such a file says of itself: when the run began
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
    CHANGES: np.dtype([(name, np.int64) for name in ("number", *STEP_COLUMNS)]),
    ARRIVALS: ARRIVAL,  # for who looks while the run goes on
}
Arrivals = npt.NDArray[np.void]


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


def run_of(header: Run, tables: Tables) -> Run:
    """The run up to its last second, from its document as it was then."""
    table = current(tables.tables[STEPS], tables.tables[CHANGES])
    if len(table):
        table[0, -1] |= int(StepFlag.FIRST)
        table[-1, -1] |= int(StepFlag.LAST)
    steps = steps_of(np.ascontiguousarray(table.T), int(tables.about[ORIGIN]))
    readings = tables.tables[READINGS]
    samples = Samples(tuple(_series(s, readings, i) for i, s in enumerate(header.samples.series)))
    ends_ns = [header.wall_ns, *steps.end_ns[-1:].tolist(), *readings["t_ns"][-1:].tolist()]
    source = header.step_source if len(steps) else "whole cell"
    return replace(header, steps=steps, samples=samples, wall_ns=max(ends_ns), step_source=source)


def _series(series: Series, readings: Table, number: int) -> Series:
    own = readings[readings["series"] == number]
    t_ns: npt.NDArray[np.int64] = own["t_ns"].copy()
    return replace(series, t_ns=t_ns, value=own["value"].copy())
