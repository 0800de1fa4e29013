"""What a run writes while it goes on, and how to read it: whoever kills its process costs it no more than a second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from gpulab.run import Run, Samples, Series
from gpulab.store.table_file import Table, Tables
from gpulab.tape.marks import MARK
from gpulab.tape.step_finder import steps_of

MARKS, READINGS, ARRIVALS = "marks", "readings", "arrivals"
ORIGIN = "origin_ns"  # what such a file says of itself: when the run began
READING = np.dtype([("series", np.int64), ("t_ns", np.int64), ("value", np.float64)])  # the mean of about a second
# at a collective: of which group, the number in it, and when by the system's clock
ARRIVAL = np.dtype([("group", np.int64), ("sequence", np.int64), ("time_ns", np.int64)])
TABLES: dict[str, np.dtype[np.void]] = {
    MARKS: MARK,
    READINGS: READING,
    ARRIVALS: ARRIVAL,  # for who looks while the run goes on
}
Arrivals = npt.NDArray[np.void]


def run_of(header: Run, tables: Tables) -> Run:
    """The run up to its last second, from its document as it was then."""
    marks = tables.tables[MARKS]
    steps = steps_of(marks, int(tables.about[ORIGIN]), int(marks["t_ns"].max(initial=0)))
    readings = tables.tables[READINGS]
    samples = Samples(tuple(_series(s, readings, i) for i, s in enumerate(header.samples.series)))
    ends_ns = [header.wall_ns, *steps.end_ns[-1:].tolist(), *readings["t_ns"][-1:].tolist()]
    source = header.step_source if len(steps) else "whole cell"
    return replace(header, steps=steps, samples=samples, wall_ns=max(ends_ns), step_source=source)


def _series(series: Series, readings: Table, number: int) -> Series:
    own = readings[readings["series"] == number]
    t_ns: npt.NDArray[np.int64] = own["t_ns"].copy()
    return replace(series, t_ns=t_ns, value=own["value"].copy())
