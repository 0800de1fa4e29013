"""Whether an overridden option of a DataLoader took effect in a run: from the record, the trace, the knob's effects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpulab.formatting import number
from gpulab.knobs.knob import KnobEffects, Value, Verification
from gpulab.run import Loader, Run, Steps

Evidence = Callable[[Value, KnobEffects, Run], Verification]

PINNED_COPY, PAGEABLE_COPY = "Pinned -> Device", "Pageable -> Device"  # in CUPTI's names of copies


def why_untouched(name: str, value: Value, effects: KnobEffects) -> str:
    if effects.refused:
        return "; ".join(effects.refused)
    if effects.counts.get("loaders as written"):
        return f"the DataLoader has {name}={value} as written"
    return "no DataLoader was asked for an iterator by torch's own DataLoader.__iter__"


def workers_alive(value: Value, effects: KnobEffects, run: Run) -> Verification:
    """Worker processes that were really there."""
    wanted, alive = int(value), effects.counts.get("worker processes", 0)
    feeder = _loader(run)
    if feeder.num_workers != wanted:
        return Verification("no effect", f"the DataLoader that fed the steps had {_processes(feeder.num_workers)}")
    if not wanted:
        return Verification("took effect", "the batches were made in the training process")
    if alive < wanted:
        return Verification("no effect", f"{alive} of {_processes(wanted)} were alive")
    cores = run.environment.usable_cores
    crowded = f", more than the {number(cores)} usable cores" if cores is not None and wanted > cores else ""
    return Verification("took effect", f"{_processes(wanted)} {'was' if wanted == 1 else 'were'} alive{crowded}")


def prefetched(value: Value, effects: KnobEffects, run: Run) -> Verification:
    """The loader as its workers were started."""
    feeder = _loader(run)
    if feeder.prefetch_factor != value or not feeder.num_workers:
        return Verification("no effect", "the DataLoader that fed the steps prefetched as before")
    ahead = int(value) * feeder.num_workers
    batches = "1 batch was" if ahead == 1 else f"up to {ahead} batches were"
    return Verification("took effect", f"{batches} prepared ahead by {_processes(feeder.num_workers)}")


def pinned(value: Value, effects: KnobEffects, run: Run) -> Verification:
    """The kind of the copies to the device in the trace; without such copies, the loader's own word."""
    feeder = _loader(run)
    if feeder.pin_memory != value:
        return Verification("no effect", f"the DataLoader that fed the steps had pin_memory={feeder.pin_memory}")
    names = run.timeline.names if run.timeline is not None else ()
    if any(PINNED_COPY in name for name in names):
        state = Verification("took effect", "copies from pinned memory in the trace")
        return state if value else Verification("cannot tell", "something else is copied from pinned memory")
    if any(PAGEABLE_COPY in name for name in names):
        words = "all copies to the device are from pageable memory"
        return Verification("no effect" if value else "took effect", words)
    return Verification("cannot tell", f"pin_memory={value} was set; no copy of a batch to the device was traced")


def persisted(value: Value, effects: KnobEffects, run: Run) -> Verification:
    """Workers started less often than epochs began, or as often."""
    epochs, starts = effects.counts.get("epochs", 0), effects.counts.get("worker starts", 0)
    if _loader(run).persistent_workers != value:
        return Verification("no effect", "the workers of the DataLoader that fed the steps are kept as before")
    words = f"workers were started {'once' if starts == 1 else f'{starts} times'} for {epochs} epochs"
    if epochs < 2:
        return Verification("cannot tell", "only one epoch was begun: its workers are started once either way")
    if value:
        return Verification("took effect" if starts < epochs else "cannot tell", words)
    return Verification("took effect" if starts else "no effect", words)


def batch_of_size(value: Value, effects: KnobEffects, run: Run) -> Verification:
    """Samples that the steps really had; where they cannot be counted, the loader's own word."""
    feeder = _loader(run)
    if feeder.batch_size != value:
        return Verification("no effect", f"the DataLoader that fed the steps gave batches of {feeder.batch_size}")
    seen = _samples_per_batch(run.steps)
    if seen == value:
        return Verification("took effect", f"batches of {value} samples")
    if seen is None:
        return Verification("took effect", f"batches of {value} by the DataLoader's sampler; samples cannot be counted")
    return Verification(
        "cannot tell", f"the DataLoader was set to batches of {value}, and the first dimension of most is {seen}"
    )


def _samples_per_batch(steps: Steps) -> int | None:
    """Of most steps: an epoch's last batch may be smaller."""
    known = (steps.sample_count >= 0) & (steps.batch_count > 0)
    if not known.any():
        return None
    return int(np.median(steps.sample_count[known] // steps.batch_count[known]))


def _loader(run: Run) -> Loader:
    assert run.loader is not None  # LoaderOption.verify has looked
    return run.loader


def _processes(count: int) -> str:
    return "1 worker process" if count == 1 else f"{count} worker processes"
