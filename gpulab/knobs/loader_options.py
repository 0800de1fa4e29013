"""The options of a DataLoader as knobs: workers, prefetch, pin_memory, persistent_workers, batch_size.

They apply to every DataLoader that the code iterates, evaluation loaders too; see `changed_loader`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from msgspec.structs import replace

from gpulab.devices.machine import detect_device, shared_memory_bytes
from gpulab.formatting import number, size
from gpulab.knobs.changed_loader import OWN_AFFAIR, PREFETCH_OF_TORCH, Option, overriding
from gpulab.knobs.knob import (
    CodeEdit,
    Knob,
    KnobEffects,
    StepTimes,
    Value,
    Verification,
    cannot_tell,
    no_effect,
    took_effect,
)
from gpulab.knobs.observation import Observation, ObservedLoader
from gpulab.run import Loader, Run, Steps

PINNED_COPY, PAGEABLE_COPY = "Pinned -> Device", "Pageable -> Device"  # parts of CUPTI's names of copies

NO_LOADER = "your code iterates no DataLoader"
NO_WORKERS = "the DataLoader has no workers; set workers=2 together with it"
UNFIT_FOR_SPAWN = (
    "the notebook defines the Dataset (or collate_fn, worker_init_fn): workers started by {method} cannot "
    "import it; move it to a .py file, or keep workers=0"
)
LARGEST_PREFETCH = 8  # limit for a climb
SMALL_SHARED_MEMORY_BYTES = 128 * 2**20  # all batches of workers pass through it; a container's default is 64 MiB


class LoaderOption(Knob):
    """One option of a DataLoader: why a loader cannot have a value, and what in a run shows that it had the value."""

    kind = "DataLoader option"
    lesson = "03_starving_gpu"
    same_training = True
    change_counts = ("loaders",)
    option: Option

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Why a loader cannot have the value; the default reason is that it has no workers."""
        if "workers" not in self.needs:
            return None
        if observed.record.iterable:
            return OWN_AFFAIR
        return NO_WORKERS if value and not observed.record.num_workers else None

    def value_in(self, observation: Observation) -> Value | None:
        """The value of the loader that feeds the steps; None without such a loader, or if it has no value."""
        if observation.loader is None:
            return None
        value: Value | None = getattr(observation.loader.record, self.option)
        return value

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Why the loader that feeds the steps cannot have it. For knobs set together see `with_settings`."""
        if observation.loader is None:
            return NO_LOADER
        return self.reason(observation.loader, value)

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        undo.enter_context(overriding(self.option, value, effects, lambda loader: self.reason(loader, value)))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """Judges by the loader that fed the steps, and by effects that only this value can have."""
        if run.loader is None:
            return cannot_tell("could not identify which DataLoader fed the steps")
        return self.loader_evidence(run.loader, value, effects.counts, run)

    @abstractmethod
    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Whether a run in which loaders were changed shows that `loader`, which fed its steps, had the value."""

    def idle_words(self, observation: Observation, value: Value, effects: KnobEffects) -> str:
        if effects.counts["loaders unchanged"]:
            return f"the DataLoader already has {self.name}={value}"
        return "no DataLoader was iterated through torch's own DataLoader.__iter__"

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(f"DataLoader(…, {self.option}={value})", "DataLoader", self.option, str(value))


def with_settings(observation: Observation, settings: Mapping[str, Value]) -> Observation:
    """The observation as if these settings were applied, for `refuses` of a knob that is set together with them.

    Then `prefetch=4` is possible if `workers=2` is set with it. Settings of other kinds of knobs change nothing.
    """
    knobs: tuple[LoaderOption, ...] = (WORKERS, PREFETCH, PERSISTENT_WORKERS, PIN_MEMORY, BATCH_SIZE)
    options: dict[str, Value] = {knob.option: settings[knob.name] for knob in knobs if knob.name in settings}
    loaders = (replace(loader, record=_imagined(loader.record, options)) for loader in observation.loaders)
    return replace(observation, loaders=tuple(loaders))


def _imagined(record: Loader, options: Mapping[str, Any]) -> Loader:
    if record.iterable:
        return record
    changed = replace(record, **options)
    workers = changed.num_workers
    prefetch = (changed.prefetch_factor or PREFETCH_OF_TORCH) if workers else None
    return replace(changed, prefetch_factor=prefetch, persistent_workers=changed.persistent_workers and workers > 0)


def _little_shared_memory(workers: int) -> tuple[str, ...]:
    shared_bytes = shared_memory_bytes()
    if not workers or shared_bytes is None or shared_bytes >= SMALL_SHARED_MEMORY_BYTES:
        return ()
    return (
        f"/dev/shm has only {size(shared_bytes)}, and workers pass batches through it: they may die with "
        '"Bus error"; start the container with --ipc=host or --shm-size=8g',
    )


def pins_nothing_here() -> bool:
    """Whether this machine has no GPU for pinned memory. Does not start a GPU driver."""
    if detect_device("auto").kind == "cuda":  # torch's own query would start the driver
        return False
    from torch import accelerator

    current = accelerator.current_accelerator()
    return not accelerator.is_available() or current is None or current.type == "mps"


def _samples_per_batch(steps: Steps) -> int | None:
    """The samples of most steps: an epoch's last batch may be smaller."""
    usable = (steps.sample_count >= 0) & (steps.batch_count > 0)
    if not usable.any():
        return None
    return int(np.median(steps.sample_count[usable] // steps.batch_count[usable]))


def _processes(count: int) -> str:
    return "1 worker process" if count == 1 else f"{count} worker processes"


# -- the knobs ---------------------------------------------------------------------------------------------------------


class Workers(LoaderOption):
    name = "workers"
    title = "Workers"
    help = "Processes that load batches in parallel with training: helps if steps wait for data"
    option: Option = "num_workers"
    options = (0, 1, 2, 4, 8)
    least = 0
    aliases = ("num_workers",)
    cost = "Each additional worker needs memory and CPU."
    starts_processes = True
    helps_against = {
        "data_starved": 1,
        "cpu_preprocessing": 1,
        "storage_bound": 1,
        "slow_collate": 1,
        "slow_hand_over": 2,
    }

    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Judges by the worker processes that were alive."""
        workers, alive = int(value), counts["worker processes"]
        if loader.num_workers != workers:
            return no_effect(f"the DataLoader that fed the steps had {_processes(loader.num_workers)}")
        if not workers:
            return took_effect("batches were loaded in the training process")
        if alive < workers:
            return no_effect(f"{alive} of {_processes(workers)} were alive")
        cores = run.environment.usable_cores
        crowded = f", more than the {number(cores)} usable cores" if cores is not None and workers > cores else ""
        return took_effect(f"{_processes(workers)} {'was' if workers == 1 else 'were'} alive{crowded}")

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Refuses if the dataset itself divides its work, or a process could not import it."""
        if observed.record.iterable:
            return OWN_AFFAIR
        if value and observed.dataset_from_main and observed.start_method != "fork":
            return UNFIT_FOR_SPAWN.format(method=observed.start_method)
        return None

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        return _little_shared_memory(int(value))

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        for caution in _little_shared_memory(int(value)):
            effects.note(caution)
        super().apply(value, effects, undo)

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """The number that keeps up with the steps, and one more; then powers of two; up to usable cores + 1."""
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
    help = "Batches that each worker prefetches: helps if loading times vary a lot between items"
    option: Option = "prefetch_factor"
    options = (1, 2, 4, 8)
    aliases = ("prefetch_factor",)
    needs = ("workers",)
    helps_against = {"data_starved": 2, "storage_bound": 2}

    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Judges by the loader as its workers were started."""
        if loader.prefetch_factor != value or not loader.num_workers:
            return no_effect("the DataLoader that fed the steps kept its prefetch_factor")
        ahead = int(value) * loader.num_workers
        batches = "1 batch was" if ahead == 1 else f"up to {ahead} batches were"
        return took_effect(f"{batches} prefetched by {_processes(loader.num_workers)}")

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        doubled = 2 * int(value or PREFETCH_OF_TORCH)
        return (doubled,) if doubled <= LARGEST_PREFETCH else ()


class PinMemory(LoaderOption):
    name = "pin_memory"
    title = "Pin memory"
    help = "Batches in page-locked memory: faster copies to the GPU, which .to(…, non_blocking=True) can overlap"
    option: Option = "pin_memory"
    options = (False, True)
    helps_against = {"blocking_copy": 1}

    def reason(self, loader: ObservedLoader, value: Value) -> str | None:
        return self.machine_refuses(value)

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if observation.loader is not None and observation.device.kind == "cuda":
            return None
        return super().refuses(observation, value)

    def machine_refuses(self, value: Value) -> str | None:
        return "there is no GPU: torch does not pin memory here" if value and pins_nothing_here() else None

    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Judges by the copies to the device in the trace; without such copies, by the loader's attribute."""
        if loader.pin_memory != value:
            return no_effect(f"the DataLoader that fed the steps had pin_memory={loader.pin_memory}")
        names = run.timeline.names if run.timeline is not None else ()
        if any(PINNED_COPY in name for name in names):
            pinned = took_effect("copies from pinned memory in the trace")
            return pinned if value else cannot_tell("other copies come from pinned memory too")
        if any(PAGEABLE_COPY in name for name in names):
            words = "all copies to the device come from pageable memory"
            return no_effect(words) if value else took_effect(words)
        return cannot_tell(f"pin_memory={value} was set, but no batch copy to the device was traced")


class PersistentWorkers(LoaderOption):
    name = "persistent_workers"
    title = "Persistent workers"
    help = "Workers stay alive between epochs: helps if epochs are short and worker start-up is slow"
    option: Option = "persistent_workers"
    options = (False, True)
    needs = ("workers",)
    helps_against = {"worker_restart": 1}

    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Judges by whether workers started less often than epochs began, or as often."""
        epochs, starts = counts["epochs"], counts["worker starts"]
        if loader.persistent_workers != value:
            return no_effect("the DataLoader that fed the steps kept its persistent_workers")
        words = f"workers were started {'once' if starts == 1 else f'{starts} times'} for {epochs} epochs"
        if epochs < 2:
            return cannot_tell("the run covers one epoch, in which workers start once either way")
        if value:
            return took_effect(words) if starts < epochs else cannot_tell(words)
        return took_effect(words) if starts else no_effect(words)


class BatchSize(LoaderOption):
    name = "batch_size"
    title = "Batch size"
    help = "Samples per step: a larger batch helps if the run is launch-bound"
    option: Option = "batch_size"
    options = (8, 16, 32, 64, 128, 256)
    lesson = "05_batch_size"
    aliases = ("bs", "batch")
    cost = "A larger batch needs more memory."
    changes_training = (
        "a different batch size changes the number of optimizer steps per epoch: the learning rate may need "
        "retuning, and losses differ"
    )
    changes_steps = True
    same_training = False
    helps_against = {"launch_bound": 3, "small_batch": 1, "memory_underused": 1}

    def loader_evidence(self, loader: Loader, value: Value, counts: Counter[str], run: Run) -> Verification:
        """Judges by the samples that the steps had; if they cannot be counted, by the loader's attribute."""
        if loader.batch_size != value:
            return no_effect(f"the DataLoader that fed the steps used batch_size={loader.batch_size}")
        samples = _samples_per_batch(run.steps)
        if samples == value:
            return took_effect(f"batches of {value} samples")
        if samples is None:
            return took_effect(f"the DataLoader's sampler used batches of {value}; samples could not be counted")
        return cannot_tell(f"batch_size={value} was set, but most batches have a first dimension of {samples}")

    def reason(self, observed: ObservedLoader, value: Value) -> str | None:
        """Refuses if torch's own sampler does not make the batches, or there are fewer items than one batch."""
        record = observed.record
        if record.iterable:
            return OWN_AFFAIR
        if observed.custom_batch_sampler:
            return "your code passes its own batch_sampler, which sets the batch size"
        if record.batch_size is None:
            return "automatic batching is off (batch_size=None): the dataset yields whole batches"
        if int(value) < 1:
            return f"batch_size must be at least 1, got {value}"
        if record.dataset_length is not None and int(value) > record.dataset_length:
            return f"the dataset has {record.dataset_length} items; the largest is batch_size={record.dataset_length}"
        return None

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        return (2 * int(value),) if value else ()


WORKERS, PREFETCH, PIN_MEMORY = Workers(), Prefetch(), PinMemory()
PERSISTENT_WORKERS, BATCH_SIZE = PersistentWorkers(), BatchSize()
