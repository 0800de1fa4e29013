"""Runs as TensorBoard scalars: a folder per run, written by torch's own writer, replaced when exported again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpulab.errors import UsageError
from gpulab.run import Run
from gpulab.store.atomic_write import make_folder, reason, write_whole
from gpulab.store.optional_packages import installed
from gpulab.store.scalars import Scalar, plain_name, scalars, started_s

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SUFFIX = ".gpulab"  # of event files: marks those that are ours to replace


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
    home = folder / _folder_name(run)
    make_folder(home)
    for file in stage.iterdir():
        write_whole(home / file.name, file.read_bytes())


def _folders_of(folder: Path, run_id: str) -> Iterator[Path]:
    return (f for f in folder.iterdir() if f.is_dir() and (f.name == run_id or f.name.endswith(f" {run_id}")))


def _folder_name(run: Run) -> str:
    """What TensorBoard lists: the user's name, and the id because names may repeat."""
    given = plain_name(run.settings.name).replace("/", "_")[:60] if run.settings.name else ""
    return f"{given} {run.id}".strip()


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as e:
        raise UsageError(f"TensorBoard scalars cannot be written: {reason(e)}.") from e
    return SummaryWriter
