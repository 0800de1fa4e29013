"""The options of a DataLoader as knobs: workers, prefetch, pin_memory, persistent_workers, batch_size.

They hold for every DataLoader that the code iterates, evaluation loaders too; gpulab.knobs.dataloader.copy tells how.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from gpulab.formatting import size
from gpulab.knobs.dataloader.changes import NO_WORKERS, OWN_AFFAIR, PREFETCH_OF_TORCH, UNFIT_FOR_SPAWN
from gpulab.knobs.dataloader.copy import Option, overriding
from gpulab.knobs.dataloader.evidence import (
    batch_of_size,
    persisted,
    pinned,
    prefetched,
    why_untouched,
    workers_alive,
)
from gpulab.knobs.knob import CodeEdit, Kind, KnobEffects, Value, Verification
from gpulab.knobs.observe.observation import Observation, ObservedLoader
from gpulab.knobs.values import switch, whole_number
from gpulab.run import Loader, Run

NO_LOADER = "the cell iterates no DataLoader"
SMALL_SHARED_MEMORY_BYTES = 128 * 2**20  # a container's default is 64 MiB, through which all batches go

Reason = Callable[[ObservedLoader, Value], str | None]
Evidence = Callable[[Value, KnobEffects, Run], Verification]


@dataclass(frozen=True, slots=True, eq=False)
class LoaderOption:
    """One option. `reason` says why a loader cannot have the value, `evidence` whether a run shows that it had it."""

    name: str
    title: str
    help: str
    option: Option
    options: tuple[Value, ...]
    read: Callable[[str, str], Value]
    reason: Reason
    evidence: Evidence
    lesson: str
    changes_training: str = ""
    kind: Kind = "DataLoader option"

    def parse(self, text: str) -> Value:
        """The value that a user wrote. Raises UsageError naming the nearest valid value."""
        return self.read(self.name, text)

    def value_in(self, observation: Observation) -> Value | None:
        """Of the loader that feeds the steps; None without one, or where it has none."""
        if observation.loader is None:
            return None
        value: Value | None = getattr(observation.loader.record, self.option)
        return value

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Why the loader that feeds the steps cannot have it. See `with_settings` for knobs that are set with it."""
        if observation.loader is None:
            return NO_LOADER
        return self.reason(observation.loader, value)

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        """What speaks against it without forbidding it."""
        return _cautions(int(value)) if self.option == "num_workers" else ()

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Override it for every DataLoader iterated inside."""
        effects = KnobEffects()
        if self.option == "num_workers":
            for caution in _cautions(int(value)):
                effects.note(caution)
        with overriding(self.option, value, effects):
            yield effects

    def forget(self) -> None:
        """Nothing is kept."""

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By the loader that fed the steps, and by what only that value can bring about."""
        if not effects.counts.get("loaders"):
            return Verification("no effect", why_untouched(self.name, value, effects))
        if run.loader is None:
            return Verification("cannot tell", "it is not known which DataLoader fed the steps")
        return self.evidence(value, effects, run)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        """A keyword of `DataLoader(…)`."""
        return CodeEdit(f"DataLoader(…, {self.option}={value})", "DataLoader", self.option, str(value))


def with_settings(observation: Observation, settings: Mapping[str, Value]) -> Observation:
    """The observation as these settings would make it: give it to `refuses` of a knob that is set together with them.

    So `prefetch=4` is possible where `workers=2` is set with it. Other knobs' settings change nothing.
    """
    return replace(
        observation, loaders=tuple(replace(s, record=_imagined(s.record, settings)) for s in observation.loaders)
    )


def _imagined(record: Loader, settings: Mapping[str, Value]) -> Loader:
    if record.iterable:
        return record
    workers = int(settings.get(WORKERS.name, record.num_workers))
    prefetch = settings.get(PREFETCH.name, record.prefetch_factor or PREFETCH_OF_TORCH)
    size = settings.get(BATCH_SIZE.name, record.batch_size)
    return replace(
        record,
        num_workers=workers,
        prefetch_factor=int(prefetch) if workers else None,
        persistent_workers=bool(settings.get(PERSISTENT_WORKERS.name, record.persistent_workers)) and workers > 0,
        pin_memory=bool(settings.get(PIN_MEMORY.name, record.pin_memory)),
        batch_size=None if size is None else int(size),
    )


def _cautions(workers: int) -> tuple[str, ...]:
    shared_bytes = _shared_memory_bytes()
    if not workers or shared_bytes is None or shared_bytes >= SMALL_SHARED_MEMORY_BYTES:
        return ()
    return (
        f"/dev/shm has {size(shared_bytes)}, through which workers hand over their batches: they may die with "
        '"Bus error"; start the container with --ipc=host or --shm-size=8g',
    )


def _shared_memory_bytes(path: str = "/dev/shm") -> int | None:
    try:
        stat = os.statvfs(path)
    except (OSError, AttributeError):  # not there, or not this system's way
        return None
    return stat.f_blocks * stat.f_frsize


# -- why a loader cannot have a value ----------------------------------------------------------------------------------


def _workers_reason(seen: ObservedLoader, value: Value) -> str | None:
    if seen.record.iterable:
        return OWN_AFFAIR
    if value and seen.dataset_from_main and seen.start_method != "fork":
        return UNFIT_FOR_SPAWN.format(method=seen.start_method)
    return None


def _needs_workers_reason(seen: ObservedLoader, value: Value) -> str | None:
    if seen.record.iterable:
        return OWN_AFFAIR
    return NO_WORKERS if value and not seen.record.num_workers else None


def _pin_reason(seen: ObservedLoader, value: Value) -> str | None:
    return None


def _batch_reason(seen: ObservedLoader, value: Value) -> str | None:
    record = seen.record
    if record.iterable:
        return OWN_AFFAIR
    if seen.custom_batch_sampler:
        return "its batches come from a batch_sampler of its own, which alone decides how large they are"
    if record.batch_size is None:
        return "the DataLoader does not batch (batch_size=None): its dataset gives whole batches"
    if int(value) < 1:
        return f"a batch of {value} is none; the smallest is batch_size=1"
    if record.dataset_length is not None and int(value) > record.dataset_length:
        return f"the dataset has {record.dataset_length} items; the largest is batch_size={record.dataset_length}"
    return None


WORKERS = LoaderOption(
    name="workers",
    title="Workers",
    help="Processes that prepare batches beside the training: helps where steps wait for data",
    option="num_workers",
    options=(0, 1, 2, 4, 8),
    read=partial(whole_number, least=0),
    reason=_workers_reason,
    evidence=workers_alive,
    lesson="03_starving_gpu",
)
PREFETCH = LoaderOption(
    name="prefetch",
    title="Prefetch",
    help="Batches that each worker prepares ahead: helps where some items take much longer than others",
    option="prefetch_factor",
    options=(1, 2, 4, 8),
    read=partial(whole_number, least=1),
    reason=_needs_workers_reason,
    evidence=prefetched,
    lesson="03_starving_gpu",
)
PIN_MEMORY = LoaderOption(
    name="pin_memory",
    title="Pin memory",
    help="Batches in page-locked memory: copies to the GPU are faster, and can overlap with .to(…, non_blocking=True)",
    option="pin_memory",
    options=(False, True),
    read=switch,
    reason=_pin_reason,
    evidence=pinned,
    lesson="03_starving_gpu",
)
PERSISTENT_WORKERS = LoaderOption(
    name="persistent_workers",
    title="Persistent workers",
    help="Workers live on from epoch to epoch: helps where epochs are short and starting workers takes long",
    option="persistent_workers",
    options=(False, True),
    read=switch,
    reason=_needs_workers_reason,
    evidence=persisted,
    lesson="03_starving_gpu",
)
BATCH_SIZE = LoaderOption(
    name="batch_size",
    title="Batch size",
    help="Samples per step: a larger batch helps where each step leaves the GPU waiting for launches",
    option="batch_size",
    options=(8, 16, 32, 64, 128, 256),
    read=partial(whole_number, least=1),
    reason=_batch_reason,
    evidence=batch_of_size,
    lesson="05_batch_size",
    changes_training="another batch size makes other and fewer or more optimizer steps of an epoch: it may need "
    "another learning rate, and the loss is not the same",
)

__all__ = ["BATCH_SIZE", "PERSISTENT_WORKERS", "PIN_MEMORY", "PREFETCH", "WORKERS", "LoaderOption", "with_settings"]
