"""Rules about the DataLoader: whether the step waits for data, which stage of loading is slow, and worker restarts."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from gpulab.analysis.loader import (
    LoadingFacts,
    epoch_starts,
    making,
    mostly_waits,
    times_by_cause,
    waiting_for_core_us,
)
from gpulab.analysis.source_lines import (
    LineShare,
    SourceLine,
    hot_line_of_loading,
    line_only_at,
    lines_beside_cost,
    loading_lines,
)
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, FindingKind, RuleContext, Undetermined, evidence
from gpulab.diagnosis.own_code import makes_own_batches, making_own_batches
from gpulab.formatting import decapitalized, duration, percent, plural
from gpulab.intervals import EMPTY, Intervals, intersect, subtract
from gpulab.run import StepFlag
from gpulab.timeline.labels import What, labels


def data_starved(context: RuleContext) -> Finding | Undetermined | None:
    """The loop waits for its next batch while the device has nothing to do.

    Measured in the untraced steps if there are any; on a GPU, only the wait that its work does not hide (accounting).
    """
    if makes_own_batches(context):
        return making_own_batches(context)
    wait = _waiting(context)
    return _finding(context, wait, "data_starved") if isinstance(wait, _Wait) else wait


def cpu_preprocessing(context: RuleContext) -> Finding | Undetermined | None:
    """The step waits for the decoding and transforming of items, which takes CPU time."""
    return _cause(context, "cpu_preprocessing")


def storage_bound(context: RuleContext) -> Finding | Undetermined | None:
    """The step waits for the reading of items, which waits for a disk, a network or a lock."""
    return _cause(context, "storage_bound")


def slow_collate(context: RuleContext) -> Finding | Undetermined | None:
    """The step waits for the collation of items into a batch."""
    return _cause(context, "slow_collate")


def slow_hand_over(context: RuleContext) -> Finding | Undetermined | None:
    """Batches are ready in time, but the loop waits for their transfer from the workers."""
    return _cause(context, "slow_hand_over")


def slow_sampler(context: RuleContext) -> Finding | Undetermined | None:
    """The sampler, in the training process, is slow to choose the items of a batch."""
    return _cause(context, "slow_sampler")


# -- the wait ----------------------------------------------------------------------------------------------------------


class _Wait(Struct, frozen=True):
    """How long a typical step waits for data, and how long without device work; `part`: that share of the step."""

    waited_us: float
    exposed_us: float
    part: float


def _waiting(context: RuleContext) -> _Wait | Undetermined | None:
    """The wait for data; None if it is too short to report, Undetermined if the run does not show it."""
    waited, share, step_us = context.facts.data_wait_us, context.facts.data_wait_fraction, context.step_us
    if not step_us:
        return None
    waited_us = context.part_us("data_wait") if waited is None or share is None else share * step_us
    exposed_us = _exposed_us(context, waited_us)
    least_us = min(waited_us, exposed_us if exposed_us is not None else waited_us)
    part = least_us / step_us if context.own is None else context.own.of("data_wait")
    if part < context.thresholds.data_wait_notice:
        return None
    if exposed_us is None:
        why = context.withheld("breakdown") or context.withheld("idle_causes")
        profiled = "Run it with the profiler, which gpulab uses unless told otherwise"
        what = "Whether the GPU has nothing to do while the loop waits for data"
        return Undetermined("data_starved", what, f"{why}: record it again" if why else profiled)
    return _Wait(waited_us, least_us, part)


def _exposed_us(context: RuleContext, waited_us: float) -> float | None:
    """The part of the wait without device work, in µs; None if the device's work is unknown."""
    if not context.on_gpu:
        return waited_us
    if context.withheld("idle_causes") is not None:
        return None
    if context.breakdown is not None:
        return context.part_us("data_wait")
    busy_pct = next((c.step_mean for c in context.facts.curves if c.name == "gpu_utilization_pct"), None)
    return None if busy_pct is None or context.withheld("breakdown") else (1 - busy_pct / 100) * context.step_us


def _finding(context: RuleContext, wait: _Wait, key: str, because: str = "") -> Finding:
    """`because`: what takes the time, if known."""
    limits, inside, by_step = context.thresholds, context.facts.loading, context.by_step
    bad = max(wait.part, wait.waited_us / context.step_us) >= limits.data_wait_bad
    figures = [
        Evidence(
            f"{duration(wait.exposed_us)} of {context.whole} is data wait{_basis(context)}{_loads(context)}",
            _longest_wait(context),
        ),
        *evidence(_bursts(context), "" if inside is None else making(inside)),
    ]
    hidden_us = wait.waited_us - wait.exposed_us
    if hidden_us > limits.silence * context.step_us:
        blocks = f"the loop itself blocks for {duration(wait.waited_us)}{' per step' if by_step else ''}"
        figures += evidence(f"{blocks}; the GPU hides {duration(hidden_us)} of that with earlier work")
    settings, cure = _cure(context, key, wait.waited_us)
    line, is_function, source = _line(context, key)
    of_unit = f"{percent(wait.part)} of {context.unit} waits on the DataLoader"
    return Finding(
        key,
        f"{'Input-bound: ' if bad else ''}{of_unit}{f'; {because}' if because else ''}.",
        tuple(figures),
        wait.part * context.step_us,
        "measured" if by_step and (not context.on_gpu or context.breakdown is not None) else "likely",
        parts=("data_wait",),
        settings=settings,
        cure=cure,
        otherwise=_cure_without_knob(context, key),
        source_line=line,
        names_function=is_function,
        source=source,
        level="bad" if bad else "notice",
    )


def _basis(context: RuleContext) -> str:
    step, shares = context.facts.typical_step_us, context.facts.shares
    if step is None:
        return ""
    if context.facts.step_us is not None and not (context.on_gpu and context.breakdown is not None):
        return f" (median of {plural(step.count, 'untraced step')})"
    count = step.count if shares is None else shares.profiled_count
    return f" (over all {count:,} traced steps)" if count > 1 else " (in the one traced step)"


def _bursts(context: RuleContext) -> str:
    """How unevenly the steps of a trace wait; for a trace with one batch, that other steps may wait less."""
    timeline = context.run.timeline
    if not context.by_step and timeline is not None and len(labels(timeline).rows(What.LOADER)) == 1:
        return "this trace holds one batch: record several, for a first one takes longer than others"
    if not context.facts.whole_window:
        return ""
    waits_ns = context.run.steps.data_wait_ns[context.run.traced_rows]
    shortest, longest = duration(int(waits_ns.min()) / 1e3), duration(int(waits_ns.max()) / 1e3)
    return f"single steps wait from {shortest} to {longest}: the batches come in bursts"


def _loads(context: RuleContext) -> str:
    """Which process loads the data, by the loader's settings, else by the iterator's class in the trace."""
    if context.loader is not None:
        return f"; num_workers={context.loader.num_workers}"
    words = {True: "; loaded by worker processes", False: "; loaded in the main process (num_workers=0)", None: ""}
    return words[context.facts.has_workers]


def _longest_wait(context: RuleContext) -> tuple[int, int] | None:
    """The profiled step that waits longest, as the place to look."""
    steps = context.breakdown.steps if context.breakdown is not None else ()
    step = max(steps, key=lambda s: s.parts_ns["data_wait"], default=None)
    return (step.start_ns, step.end_ns) if step is not None and step.parts_ns["data_wait"] else None


# -- from inside the DataLoader ----------------------------------------------------------------------------------------

_BECAUSE = {
    "cpu_preprocessing": "{share} of loading is CPU work (read, decode, transform)",
    "storage_bound": "{share} of loading is blocked on I/O or locks",
    "slow_collate": "collate takes {share} of loading",
}
_BESIDE_MAKING = ("slow_hand_over", "slow_sampler")
_MANY_TENSORS = 16  # ours: for fewer tensors, packing hardly changes the cost


def _cause(context: RuleContext, key: str) -> Finding | Undetermined | None:
    """The finding of that cause, if the step waits for data and the cause takes most of the time to make a batch."""
    wait, inside = _waiting(context), context.facts.loading
    if makes_own_batches(context) or not isinstance(wait, _Wait):  # own batches need no DataLoader
        return None
    if inside is None:
        what = "What inside the DataLoader takes the time: reading, decoding, or collate"
        return Undetermined(key, what, _why_not_inside(context)) if key in _BECAUSE else None
    limit = context.thresholds.loading_cause
    idle = inside.batch_us < limit * context.step_us * max(
        1, context.facts.worker_count or 0
    )  # who is busy is late, too
    if inside.handing_over >= limit and idle:
        because = _beside_making(context, inside, key)
        return _finding(context, wait, key, because) if because else None
    times = times_by_cause(inside)
    of_us = inside.batch_us - waiting_for_core_us(inside)  # time without a core does not count
    if of_us <= 0 or times.get(key, 0.0) < max(*times.values(), limit * of_us):
        return None
    each_us = _one_by_one_us(context)
    if each_us is None or key == "storage_bound":
        return _finding(context, wait, key, _BECAUSE[key].format(share=percent(times[key] / inside.batch_us)))
    return _finding(context, wait, key, f"its small items are fetched one by one, {duration(each_us)} each")


def _beside_making(context: RuleContext, inside: LoadingFacts, key: str) -> str:
    """What the loop waits for while no worker makes its batch: the sampler, if a line shows it, else the hand-over.

    Empty if the finding has a different key.
    """
    line, loader, share = _sampler_line(context), context.loader, percent(inside.handing_over)
    if loader is None or key != ("slow_hand_over" if line is None else "slow_sampler"):
        return ""
    if line is not None:
        return f"its sampler, in the main process, takes {percent(line.share)} of that"
    if (loader.batch_tensors or 0) >= _MANY_TENSORS:
        return f"handing over {loader.batch_tensors:,} tensors per batch, one by one, takes {share} of that"
    return f"{share} of that for batches that are made, until the main process has them" if loader.num_workers else ""


def _why_not_inside(context: RuleContext) -> str:
    if context.run.source == "trace":
        return "Run the training under gpulab: a trace from another tool has no DataLoader workers"
    lacking = next((m for m in context.run.missing if m.key == "workers_inside"), None)
    return (
        "The batches of this run were not timed: run it again"
        if lacking is None
        else (f"It was not timed: {lacking.reason}")
    )


# -- the line of code --------------------------------------------------------------------------------------------------


def _line(context: RuleContext, key: str) -> tuple[str, bool, tuple[SourceLine, ...]]:
    """The line or loop that surely takes most of the time to make batches, in any process, and the lines around it,
    each with its share.

    If no line surely does, the function with the longest part, and True: its line is unknown. Empty if the function is
    not the user's code.
    """
    run, collating, line = context.run, key == "slow_collate", ""
    source: tuple[SourceLine, ...] = ()
    if key in _BESIDE_MAKING:
        choosing = _sampler_line(context)
        line = "" if choosing is None else str(choosing.place)
    elif run.loading_looks is not None:
        place = hot_line_of_loading(run, collating=collating)
        if place is not None:
            line, source = str(place), lines_beside_cost(run, place, *loading_lines(run, collating=collating))
    elif context.facts.worker_count == 0:
        line = context.python_line_at(_waiting_times(context))
    function = "" if line else _function_line(context, key)
    return line or function, bool(function), source


def _sampler_line(context: RuleContext) -> LineShare | None:
    """The line of the user's sampler that surely takes most of the loop's wait; None without such a line."""
    account, waits = context.breakdown, _waiting_times(context)
    if context.loader is None or not context.loader.sampler_line or account is None:
        return None
    return line_only_at(context.run, waits, subtract(account.host_covered, waits))


def _function_line(context: RuleContext, key: str) -> str:
    loader, inside = context.loader, context.facts.loading
    if loader is None or inside is None:
        return ""
    longest = max(inside.read_us, inside.transform_us, inside.collate_us)
    if key in ("slow_collate", "slow_hand_over") or longest == inside.collate_us:
        return loader.collate_line
    return loader.items_line if longest == inside.read_us else loader.transform_line


def _waiting_times(context: RuleContext) -> Intervals:
    """When the training thread is in the DataLoader, within the profiled steps."""
    timeline, account = context.run.timeline, context.breakdown
    if timeline is None or account is None or not account.steps:
        return EMPTY
    return intersect(labels(timeline).loading, account.host_covered)


# -- the cure ----------------------------------------------------------------------------------------------------------

_UNKNOWN_MACHINE = 8  # most workers to propose if the usable cores are unknown
_LEAST_COMPUTING = 0.01  # ours, share of the step: the smallest that can be distinguished from zero
_SMALL_ITEM_US = 20.0  # ours: indexing, collation and two Python calls take 5 to 10 µs per item
_NO_ROOM = "Host memory is nearly full: more workers or a cache would not fit."
_COLLATED = (
    "Vectorize collate_fn: torch.stack, or one pad_sequence per batch, instead of Python loops over items. Move "
    "per-item work into __getitem__."
)
_STACKED = (
    "Let __getitem__ return a few large tensors or NumPy arrays, not lists of numbers: PyTorch collates each part "
    "separately. Or pass a collate_fn that uses torch.stack."
)
_WHOLE_BATCHES = (
    "Index a whole batch at once: DataLoader(dataset, batch_size=None, sampler=BatchSampler(RandomSampler(dataset), "
    "batch_size, drop_last)) gives __getitem__ all rows of a batch, and collates nothing. A TensorDataset takes it so."
)
_PACKING = (
    "Return a few large tensors from collate_fn: concatenate each field (torch.cat), and split it in the loop. Or load "
    "in the main process (num_workers=0) where making a batch takes less than handing it over."
)
_CROSSING = (
    "A batch takes about 2 ms to cross, whatever it holds. Load several steps at once (a larger batch_size, split in "
    "the loop). Or use num_workers=0 where making a batch takes less than that."
)
_CHOOSING = (
    "A sampler runs in the main process, whatever num_workers is. Draw the indices of a whole epoch at once, or of a "
    "batch without permuting or sorting all items (rng.integers, Generator.choice)."
)

_Settings = tuple[tuple[str, str], ...]


def _cure(context: RuleContext, key: str, waited_us: float) -> tuple[_Settings, str]:
    """The knobs and the words that cure the finding with that key.

    A cache keeps items, not batches, so it is no cure for `slow_collate`.
    """
    loader, workers, inside = context.loader, context.facts.worker_count, context.facts.loading
    if key in _BESIDE_MAKING:
        here = key == "slow_hand_over" and inside is not None and inside.batch_us < waited_us
        return (("workers", "0"),) if here else (), _cure_without_knob(context, key)
    collating = _of_whole_batches(context, key)
    if context.host_memory_full:
        return (), f"{_NO_ROOM} {_cure_without_knob(context, key)}"
    if loader is not None and loader.iterable:
        shared = "Give the iterable dataset workers that share its items, or prepare them before the training."
        return (), collating or shared
    if workers is None:
        return (), collating or "Load with more workers (num_workers), or make each item cheaper to load."
    room = _room_for_workers(context)
    # ⌈time to make a batch / time to compute one⌉, and one more for an uneven one (definitions.md, "Feeding")
    computing_us = max(context.step_us - waited_us, _LEAST_COMPUTING * context.step_us)
    making_us = inside.batch_us if inside is not None else waited_us if not workers else workers * context.step_us
    enough = min(math.ceil(making_us / computing_us) + 1, room)
    if enough > workers:
        processes = "1 worker process" if enough == 1 else f"{enough} worker processes"
        how = f"Use {processes}: DataLoader(…, num_workers={enough}, persistent_workers=True)."
        both = f"{collating} If that is not enough: {decapitalized(how)}"
        return (("workers", str(enough)),), both if collating else how
    if collating:
        return (), collating
    cause = "no CPU core is left for another worker" if room <= workers else "more would not help"
    return (("cache", "on"),), (
        f"It already uses {plural(workers, 'worker')} and {cause}. Make each item cheaper to load, or cache the items "
        "(decoded files, or in memory with the dataset cache)."
    )


def _cure_without_knob(context: RuleContext, key: str) -> str:
    """The cure in words if the setting of `_cure` is predicted to gain nothing."""
    if key == "slow_sampler":
        return _CHOOSING
    if key == "slow_hand_over":
        many = context.loader is not None and (context.loader.batch_tensors or 0) >= _MANY_TENSORS
        return _PACKING if many else _CROSSING
    other = "No DataLoader setting is predicted to help: make each item and batch cheaper to load."
    return _of_whole_batches(context, key) or other


def _of_whole_batches(context: RuleContext, key: str) -> str:
    """How to make a whole batch at once, if the time goes to single items; else empty."""
    if key in ("slow_collate", "cpu_preprocessing") and _one_by_one_us(context) is not None:
        return _WHOLE_BATCHES
    by_torch = context.loader is not None and context.loader.own_collate is False
    return "" if key != "slow_collate" else _STACKED if by_torch else _COLLATED


def _one_by_one_us(context: RuleContext) -> float | None:
    """The time of one item of a map-style dataset, if it hardly exceeds the cost of its Python calls; else None."""
    inside, loader = context.facts.loading, context.loader
    if inside is None or not inside.items_per_batch or loader is None or loader.iterable:
        return None
    each_us = (inside.read_us + inside.transform_us + inside.collate_us) / inside.items_per_batch
    return each_us if each_us <= _SMALL_ITEM_US else None


def _room_for_workers(context: RuleContext) -> int:
    """The usable cores: with more processes, they take time from each other, unless they wait for I/O."""
    cores, inside = context.run.environment.usable_cores, context.facts.loading
    if cores is None or (inside is not None and mostly_waits(inside)):
        return max(_UNKNOWN_MACHINE, int(cores or 0))
    return max(1, math.floor(cores))


# -- where an epoch begins ---------------------------------------------------------------------------------------------

_MOST_STEPS = 0.5  # ours, share of steps: more beginnings are not epochs, but `next(iter(loader))` in the loop
_KEEP_WORKERS = (
    "Keep the workers alive between epochs: DataLoader(…, persistent_workers=True), with one iterator per epoch."
)
_MAKE_ONCE_AND_KEEP = (
    "Create the DataLoader once, before the loop (in Lightning leave reload_dataloaders_every_n_epochs at 0): its "
    f"workers end with it. Then {decapitalized(_KEEP_WORKERS).replace('the workers', 'them', 1)}"
)


def worker_restart(context: RuleContext) -> Finding | Undetermined | None:
    """Workers are started again for each epoch, and its first step waits until they have a batch.

    The cost is the extra wait of those steps over other steps, without the very first start, spread over all steps.
    """
    steps, loader, inside = context.run.steps, context.loader, context.facts.loading
    stay = loader is not None and loader.persistent_workers and not loader.remade  # else they end with the loader
    if not context.step_us or context.facts.worker_count == 0 or stay:
        return None
    starts = epoch_starts(context.run, inside)
    if starts is None or starts.begins > _MOST_STEPS * len(steps):
        return None
    again, longer_us = starts.rows, starts.longer_us
    cost_us = float(longer_us.sum()) / len(steps)
    whole_us = max(context.whole_us, context.step_us + cost_us)
    if cost_us < context.thresholds.silence * whole_us:
        return None
    each = duration(float(np.median(longer_us)))
    if loader is None:
        return Undetermined(
            "worker_restart",
            f"Why each epoch starts with a wait of {each}: DataLoader workers may restart each time",
            "Load with torch.utils.data.DataLoader, whose options gpulab records",
        )
    slowest = int(again[np.argmax(longer_us)])
    came = f"in {len(steps):,} steps the first batch of an epoch came {each} later than others"
    words = f"{plural(len(again), 'time')} {came}: {duration(cost_us)} per step, {percent(cost_us / whole_us)}"
    return Finding(
        "worker_restart",
        f"Each epoch starts with a wait of {each}, because the DataLoader restarts its workers.",
        (Evidence(words, (int(steps.start_ns[slowest]), int(steps.end_ns[slowest]))),),
        cost_us,
        "measured",
        parts=(f"{BETWEEN}/worker_restart",),
        settings=() if loader.remade else (("persistent_workers", "on"),),
        cure=_MAKE_ONCE_AND_KEEP if loader.remade else _KEEP_WORKERS,
    )


def new_iterators(context: RuleContext) -> Finding | None:
    """Nearly every step restarts its loader, as `next(iter(loader))` does."""
    loader, wait, inside, step_us = context.loader, context.facts.data_wait_us, context.facts.loading, context.step_us
    fresh = (context.run.steps.flags[context.facts.selection.rows] & StepFlag.EPOCH_START) != 0
    if not step_us or loader is None or wait is None or not len(fresh) or fresh.mean() <= _MOST_STEPS:
        return None
    cost_us = max(0.0, wait.median - (inside.batch_us if inside is not None else 0.0))
    if cost_us < context.thresholds.data_wait_notice * step_us:
        return None
    anew = f"starts {plural(loader.num_workers, 'worker')} and draws" if loader.num_workers else "draws"
    batch = f"; making a batch takes {duration(inside.batch_us)}" if inside is not None else ""
    return Finding(
        "new_iterators",
        f"Each step makes a new iterator of its DataLoader: that takes {percent(cost_us / step_us)} of each step.",
        evidence(f"{int(fresh.sum()):,} of {len(fresh):,} steps do; each {anew} the order of all items{batch}"),
        cost_us,
        "measured" if inside is not None else "likely",
        parts=("data_wait",),
        cure="Make it once: loop over the loader itself (for batch in loader), or call iter(loader) before the loop "
        "and anew only at its end. Where an epoch is one batch, keep that batch.",
        source_line=context.line_at(_waiting_times(context)),
    )


_LESSON, _SYMPTOM = "03_starving_gpu", ("data_starved",)
FINDINGS = (
    FindingKind("data_starved", "waiting for data", data_starved, _LESSON),
    FindingKind("cpu_preprocessing", "CPU preprocessing", cpu_preprocessing, _LESSON, explains=_SYMPTOM),
    FindingKind("storage_bound", "I/O-bound data loading", storage_bound, "04_preprocessing", explains=_SYMPTOM),
    FindingKind("slow_collate", "slow collate", slow_collate, _LESSON, explains=_SYMPTOM),
    FindingKind("slow_hand_over", "slow hand-over of batches", slow_hand_over, _LESSON, explains=_SYMPTOM),
    FindingKind("slow_sampler", "slow sampler", slow_sampler, _LESSON, explains=_SYMPTOM),
    FindingKind("worker_restart", "restarting DataLoader workers", worker_restart, _LESSON),
    FindingKind("new_iterators", "new iterators", new_iterators, _LESSON, explains=("data_starved", "slow_hand_over")),
)
