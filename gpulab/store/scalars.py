"""What a run recorded along its time, as named curves that experiment trackers can plot.

`step/…` has one point per step, numbered as the steps are; `curve/…` has one point per reading of a meter, in the unit
that its name ends with, numbered in milliseconds since the start of the run. Long curves are thinned to every n-th
point, their values unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from gpulab.errors import StoreError
from gpulab.run import Float64, Int64, Run
from gpulab.store.folders import moment

MOST_POINTS = 10_000  # a tracker draws fewer, and writing takes some 20 µs a point


class Scalar(Struct, frozen=True):
    """One curve. `t_ns` counts since the start of the run; `thinned` says that only each so-manieth point is here."""

    name: str
    number: Int64
    t_ns: Int64
    value: Float64
    thinned: int = 1

    def __len__(self) -> int:
        return len(self.number)


def scalars(run: Run) -> list[Scalar]:
    """All curves of a run, each name once; those without a point are left out."""
    named: dict[str, Scalar] = {}
    for scalar in (*_of_steps(run), *_of_readings(run)):
        if len(scalar):
            name = _free(scalar.name, named)
            named[name] = _thinned(scalar, name)
    return list(named.values())


def started_s(run: Run) -> float:
    """Unix time of the run's start; 0 where its date cannot be read."""
    try:
        return moment(run.created).timestamp()
    except (StoreError, OverflowError):
        return 0.0


def plain_name(name: str) -> str:
    """A name that every tracker takes: letters, digits, `_ . - / space`, at most 100 of them."""
    return re.sub(r"[^A-Za-z0-9_./ -]", "_", name)[:100].strip(" /.") or "unnamed"


def _of_steps(run: Run) -> Iterator[Scalar]:
    steps = run.steps
    columns = {"wall_ms": steps.time_ns / 1e6, "data_wait_ms": steps.data_wait_ns / 1e6}
    if steps.optimizer_ns.any():
        columns["optimizer_ms"] = steps.optimizer_ns / 1e6
    for name, value in columns.items():
        yield Scalar(f"step/{name}", steps.number, steps.end_ns, value)
    countable = (steps.sample_count >= 0) & (steps.time_ns > 0)
    rate = steps.sample_count[countable] / (steps.time_ns[countable] / 1e9)
    yield Scalar("step/samples_per_s", steps.number[countable], steps.end_ns[countable], rate)


def _of_readings(run: Run) -> Iterator[Scalar]:
    for series in run.samples.series:
        yield Scalar(f"curve/{plain_name(series.name)}", series.t_ns // 1_000_000, series.t_ns, series.value)


def _thinned(scalar: Scalar, name: str) -> Scalar:
    every = -(-len(scalar) // MOST_POINTS)
    return Scalar(name, scalar.number[::every], scalar.t_ns[::every], np.asarray(scalar.value[::every], float), every)


def _free(name: str, taken: dict[str, Scalar]) -> str:
    """Two meters may have one name, one per GPU say."""
    count = 1
    while (free := name if count == 1 else f"{name}_{count}") in taken:
        count += 1
    return free
