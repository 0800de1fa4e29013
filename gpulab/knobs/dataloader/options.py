"""The options of a DataLoader as knobs: workers, prefetch, pin_memory, persistent_workers, batch_size.

They hold for every DataLoader that the code iterates, evaluation loaders too; gpulab.knobs.dataloader.copy tells how.
"""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from gpulab.formatting import size
from gpulab.knobs.dataloader.changes import NO_WORKERS, OWN_AFFAIR, PREFETCH_OF_TORCH, UNFIT_FOR_SPAWN
from gpulab.knobs.dataloader.copy import Option, overriding
from gpulab.knobs.dataloader.evidence import (
    Evidence,
    batch_of_size,
    persisted,
    pinned,
    prefetched,
    why_untouched,
    workers_alive,
)
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, StepTimes, Value, Verification
from gpulab.knobs.observe.observation import Observation, ObservedLoader
from gpulab.run import Loader, Run

NO_LOADER = "the cell iterates no DataLoader"
LARGEST_PREFETCH = 8  # that a climb tries
SMALL_SHARED_MEMORY_BYTES = 128 * 2**20  # a container's default is 64 MiB, through which all batches go


class LoaderOption(Knob):
    """One option: each says by itself what a loader cannot have, and what shows in a run that a loader had it."""

    kind: Kind = "DataLoader option"
    lesson = "03_starving_gpu"
    option: Option
    evidence: Evidence  # whether a run in which loaders were changed shows that they had the value

    @abstractmethod
    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Why a loader cannot have the value."""

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

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Override it for every DataLoader iterated inside."""
        effects = KnobEffects()
        with overriding(self.option, value, effects):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By the loader that fed the steps, and by what only that value can bring about."""
        if not effects.counts.get("loaders"):
            return Verification("no effect", why_untouched(self.name, value, effects))
        if run.loader is None:
            return Verification("cannot tell", "it is not known which DataLoader fed the steps")
        return self.evidence(value, effects, run)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
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


def _little_shared_memory(workers: int) -> tuple[str, ...]:
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


def _needs_workers(observed: ObservedLoader, value: Value) -> str | None:
    if observed.record.iterable:
        return OWN_AFFAIR
    return NO_WORKERS if value and not observed.record.num_workers else None


class Workers(LoaderOption):
    name = "workers"
    title = "Workers"
    help = "Processes that prepare batches beside the training: helps where steps wait for data"
    option: Option = "num_workers"
    evidence = staticmethod(workers_alive)
    options: tuple[Value, ...] = (0, 1, 2, 4, 8)
    least = 0
    aliases = ("num_workers",)
    same_training = True
    starts_processes = True
    helps_against: Mapping[str, int] = {
        "data_starved": 1,
        "cpu_preprocessing": 1,
        "storage_bound": 1,
        "slow_collate": 1,
    }

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Where the dataset itself divides its work, or a process could not import it."""
        if observed.record.iterable:
            return OWN_AFFAIR
        if value and observed.dataset_from_main and observed.start_method != "fork":
            return UNFIT_FOR_SPAWN.format(method=observed.start_method)
        return None

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        """Little shared memory, through which batches come."""
        return _little_shared_memory(int(value))

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """As every option, with its cautions noted."""
        with super().applied(value) as effects:
            for caution in _little_shared_memory(int(value)):
                effects.note(caution)
            yield effects

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """As many as keep up with the steps, and one more; then powers of two; up to usable cores + 1."""
        now, most = int(value or 0), max(1, math.floor(times.cores)) + 1
        counts: list[int] = []
        if times.data_wait_us is not None and times.step_us > times.data_wait_us:
            load_us = now * times.step_us if now else times.data_wait_us  # of one batch, in one process
            needed = math.ceil(load_us / (times.step_us - times.data_wait_us))
            counts = [min(needed, most), min(needed + 1, most)]
        counts += [2**k for k in range(most.bit_length()) if 2**k <= most]
        return [count for count in dict.fromkeys(counts) if count > now]


class Prefetch(LoaderOption):
    name = "prefetch"
    title = "Prefetch"
    help = "Batches that each worker prepares ahead: helps where some items take much longer than others"
    option: Option = "prefetch_factor"
    evidence = staticmethod(prefetched)
    options: tuple[Value, ...] = (1, 2, 4, 8)
    aliases = ("prefetch_factor",)
    same_training = True
    needs = ("workers",)
    helps_against: Mapping[str, int] = {"data_starved": 2, "storage_bound": 2}

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Without workers nobody loads ahead."""
        return _needs_workers(observed, value)

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        doubled = 2 * int(value or PREFETCH_OF_TORCH)
        return (doubled,) if doubled <= LARGEST_PREFETCH else ()


class PinMemory(LoaderOption):
    name = "pin_memory"
    title = "Pin memory"
    help = "Batches in page-locked memory: copies to the GPU are faster, and can overlap with .to(…, non_blocking=True)"
    option: Option = "pin_memory"
    evidence = staticmethod(pinned)
    options: tuple[Value, ...] = (False, True)
    same_training = True
    helps_against: Mapping[str, int] = {"blocking_copy": 1}

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Every loader can."""
        return None


class PersistentWorkers(LoaderOption):
    name = "persistent_workers"
    title = "Persistent workers"
    help = "Workers live on from epoch to epoch: helps where epochs are short and starting workers takes long"
    option: Option = "persistent_workers"
    evidence = staticmethod(persisted)
    options: tuple[Value, ...] = (False, True)
    same_training = True
    needs = ("workers",)
    helps_against: Mapping[str, int] = {"worker_restart": 1}

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Without workers there are none to keep."""
        return _needs_workers(observed, value)


class BatchSize(LoaderOption):
    name = "batch_size"
    title = "Batch size"
    help = "Samples per step: a larger batch helps where each step leaves the GPU waiting for launches"
    option: Option = "batch_size"
    evidence = staticmethod(batch_of_size)
    options: tuple[Value, ...] = (8, 16, 32, 64, 128, 256)
    lesson = "05_batch_size"
    aliases = ("bs", "batch")
    changes_training = (
        "another batch size makes other and fewer or more optimizer steps of an epoch: it may need "
        "another learning rate, and the loss is not the same"
    )
    changes_steps = True
    helps_against: Mapping[str, int] = {"launch_bound": 3, "small_batch": 1, "memory_underused": 1}

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Where something else makes the batches, or there are not so many items."""
        record = observed.record
        if record.iterable:
            return OWN_AFFAIR
        if observed.custom_batch_sampler:
            return "its batches come from a batch_sampler of its own, which alone decides how large they are"
        if record.batch_size is None:
            return "the DataLoader does not batch (batch_size=None): its dataset gives whole batches"
        if int(value) < 1:
            return f"a batch of {value} is none; the smallest is batch_size=1"
        if record.dataset_length is not None and int(value) > record.dataset_length:
            return f"the dataset has {record.dataset_length} items; the largest is batch_size={record.dataset_length}"
        return None

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        return (2 * int(value),) if value else ()


WORKERS, PREFETCH, PIN_MEMORY = Workers(), Prefetch(), PinMemory()
PERSISTENT_WORKERS, BATCH_SIZE = PersistentWorkers(), BatchSize()
