"""Runs as TensorBoard scalars: a folder per run, written by torch's own writer, replaced when exported again.

`step/…` has one point per step, numbered as the steps are; `curve/…` has one point per reading of a meter, in the unit
that its name ends with, numbered in milliseconds since the start of the run. Long curves are thinned to every n-th
point, their values unchanged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulab.errors import StoreError, UsageError
from gpulab.run import Float64, Int64, Run
from gpulab.store.atomic_write import make_folder, reason, write_whole
from gpulab.store.folders import moment
from gpulab.store.tables import installed

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SUFFIX = ".gpulab"  # of event files: marks those that are ours to replace
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


def require() -> None:
    """Raises UsageError naming the package where TensorBoard's writer is not there."""
    if not installed("tensorboard"):
        raise UsageError("TensorBoard scalars need TensorBoard: pip install tensorboard.")


def export(run: Run, folder: Path) -> list[Scalar]:
    """Write one run's curves under the folder; returns them. Raises UsageError and StoreError.

    A point's step is the step's number, or milliseconds since the start of the run for a meter's reading; its wall time
    is when it happened.
    """
    import tempfile

    make_folder(folder)
    curves, start_s = scalars(run), started_s(run)
    with tempfile.TemporaryDirectory(prefix="gpulab-") as stage:
        with contextlib.closing(_writer_class()(log_dir=stage, filename_suffix=_SUFFIX)) as writer:
            for curve in curves:
                for number, t_ns, value in zip(curve.number, curve.t_ns, curve.value, strict=True):
                    writer.add_scalar(curve.name, float(value), int(number), start_s + t_ns / 1e9)
        _replace(folder, run, Path(stage))
    return curves


def _replace(folder: Path, run: Run, stage: Path) -> None:
    for old in _folders_of(folder, run.id):
        with contextlib.suppress(OSError):
            for file in old.glob(f"events.out.tfevents.*{_SUFFIX}"):
                file.unlink()
            old.rmdir()  # of a run that has another name by now; not where somebody else's files are
    # what TensorBoard lists: the user's name, and the id because names may repeat
    given = plain_name(run.settings.name).replace("/", "_")[:60] if run.settings.name else ""
    home = folder / f"{given} {run.id}".strip()
    make_folder(home)
    for file in stage.iterdir():
        write_whole(home / file.name, file.read_bytes())


def _folders_of(folder: Path, run_id: str) -> Iterator[Path]:
    return (f for f in folder.iterdir() if f.is_dir() and (f.name == run_id or f.name.endswith(f" {run_id}")))


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise UsageError(f"TensorBoard scalars cannot be written: {reason(e)}.") from e
    return SummaryWriter
