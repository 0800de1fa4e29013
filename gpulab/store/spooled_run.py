"""A run as its process spools it while it goes on, so that a reader can finish it where the process was killed.

`marks` and `readings` are its columns so far. `sketch` is text: the document of a run without columns, written again
whenever more of it is known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gpulab.run import Missing, Run, Samples, Series
from gpulab.store import run_format
from gpulab.store.spool import Spool, Spooled, Table
from gpulab.tape.marks import MARK
from gpulab.tape.step_finder import steps_of

MARKS, READINGS, SKETCH, ARRIVALS = "marks", "readings", "sketch", "arrivals"
READING = np.dtype([("series", np.int64), ("t_ns", np.int64), ("value", np.float64)])  # the mean of about a second
# at a collective: of which group, the number in it, and when by the system's clock
ARRIVAL = np.dtype([("group", np.int64), ("sequence", np.int64), ("time_ns", np.int64)])
TABLES: dict[str, np.dtype[np.void]] = {
    MARKS: MARK,
    READINGS: READING,
    SKETCH: np.dtype([("byte", np.uint8)]),
    ARRIVALS: ARRIVAL,  # the latest, for who looks while the run goes on
}
Arrivals = npt.NDArray[np.void]

KILLED = "its process was killed"


def write_sketch(spool: Spool, run: Run) -> None:
    """What is known of the run by now; its columns are left out. Raises OSError."""
    text = run_format.encode_header(run)
    spool.append(SKETCH, 0, text, len(text))


def finished(spooled: Spooled) -> Run:
    """The run up to its last second, `interrupted`. Raises StoreError where too little of it was written."""
    sketch = run_format.decode_header(spooled.tables[SKETCH].tobytes())
    marks = np.array(spooled.tables[MARKS]).view(MARK)
    steps = steps_of(marks, int(spooled.about["origin_ns"]), int(marks["t_ns"][-1]) if len(marks) else 0)
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
