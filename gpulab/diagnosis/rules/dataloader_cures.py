"""What to do about a step that waits for data: as many workers as there is room for, else less work per batch."""

from __future__ import annotations

import math

from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.rules.dataloader_evidence import mostly_waits
from gpulab.formatting import decapitalized, plural
from gpulab.run import Loader

Cure = tuple[tuple[tuple[str, str], ...], str]  # knobs, and words

_UNKNOWN_MACHINE = 8  # workers proposed at most where the usable cores are not known
_LEAST_COMPUTING = 0.01  # ours, of the step: as much as can be told from nothing
_NO_ROOM = "The machine's memory is nearly full: more processes or a cache would not fit."
_COLLATED = (
    "Put the batch together in few operations: torch.stack, or pad_sequence once per batch, instead of item by item "
    "and number by number in collate_fn; what concerns one item alone belongs into __getitem__."
)
_STACKED = (
    "Let __getitem__ return few and large tensors or NumPy arrays, and no lists of numbers: PyTorch joins each part of "
    "an item by itself. Or give collate_fn a function that makes the batch with torch.stack."
)


def cure_of_waiting(context: RuleContext, key: str, step_us: float, waited_us: float) -> Cure:
    """The knobs and the words for the finding of that key; the typical step and its wait in µs.

    No knob keeps a batch from being put together anew, so `slow_collate` is never told to keep its items.
    """
    loader, workers = context.facts.run.loader, context.facts.worker_count
    collating = _collating(loader) if key == "slow_collate" else ""
    if context.host_memory_full:
        return (), f"{_NO_ROOM} {cure_without_knob(context, key)}"
    if loader is not None and loader.iterable:
        shared = "Give the iterable dataset workers that share its items, or prepare them before the training."
        return (), collating or shared
    if workers is None:
        more = "Load with more workers (num_workers), or make each item cheaper to load."
        return (), collating or more
    room = _room_for_workers(context)
    # ⌈time to make a batch / time to compute one⌉, and one more for an uneven one (definitions.md, "Feeding")
    computing = max(step_us - waited_us, _LEAST_COMPUTING * step_us)
    inside = context.facts.loading
    making = inside.batch_us if inside is not None else waited_us if not workers else workers * step_us
    wanted = min(math.ceil(making / computing) + 1, room)
    if wanted > workers:
        return _more_workers(wanted, collating)
    if collating:
        return (), collating
    cause = "there is no further processor core for another worker" if room <= workers else "more would not help"
    return (("cache", "on"),), (
        f"It loads with {plural(workers, 'worker')} already and {cause}: make each item cheaper to "
        "load, or prepare the items once and keep them (decoded files, or in memory as the dataset cache does)."
    )


def cure_without_knob(context: RuleContext, key: str) -> str:
    """Where what `cure_of_waiting` sets is predicted to bring nothing."""
    if key == "slow_collate":
        return _collating(context.facts.run.loader)
    return "No setting of the DataLoader is predicted to help: make each item, and each batch, cheaper to prepare."


def _collating(loader: Loader | None) -> str:
    return _STACKED if loader is not None and loader.own_collate is False else _COLLATED


def _more_workers(wanted: int, collating: str) -> Cure:
    """`collating`: what to do first, where putting batches together is the cause."""
    processes = "1 worker process" if wanted == 1 else f"{wanted} worker processes"
    how = f"Load with {processes} beside the training: DataLoader(…, num_workers={wanted}, persistent_workers=True)."
    return (("workers", str(wanted)),), f"{collating} If that is not enough: {decapitalized(how)}" if collating else how


def _room_for_workers(context: RuleContext) -> int:
    """Usable cores: more processes than that take time from each other, unless they wait for something else."""
    cores, inside = context.facts.run.environment.usable_cores, context.facts.loading
    if cores is None or (inside is not None and mostly_waits(inside)):
        return max(_UNKNOWN_MACHINE, int(cores or 0))
    return max(1, math.floor(cores))
