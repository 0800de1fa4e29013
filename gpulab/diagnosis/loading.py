"""Rules about feeding the step: it waits for data, and what inside the DataLoader takes the time.

What a finding about loading rests on: what the time to make a batch goes to, and at which line of the code.

Rules about where an epoch begins: a loader that starts its workers anew each time.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from gpulab.analysis.loader import LoadingFacts, mostly_waits, times_by_cause, waiting_for_core_us
from gpulab.analysis.source_lines import (
    LineShare,
    SourceLine,
    hot_line_of_loading,
    line_only_at,
    lines_beside_cost,
    loading_lines,
)
from gpulab.diagnosis.finding import BETWEEN, Evidence, Finding, FindingKind, RuleContext, Undetermined
from gpulab.diagnosis.own_code import makes_own_batches, making_own_batches
from gpulab.formatting import decapitalized, duration, percent, plural
from gpulab.intervals import EMPTY, Intervals, intersect, subtract
from gpulab.run import StepFlag
from gpulab.timeline.labels import What, labels


def data_starved(context: RuleContext) -> Finding | Undetermined | None:
    """The loop waits for its next batch, and the device has nothing to do meanwhile.

    Of the unprofiled steps where there are any; on a GPU only what its work does not hide, from the accounting.
    """
    if makes_own_batches(context):
        return making_own_batches(context)
    wait = _waiting(context)
    if isinstance(wait, Undetermined):
        return wait
    if wait is None:
        return None
    inside = context.facts.loading
    if inside is None:
        return _finding(context, wait, "data_starved", f"{wait.sentence}.")
    return _finding(context, wait, "data_starved", f"{wait.sentence}.", Evidence(making(inside)))


def cpu_preprocessing(context: RuleContext) -> Finding | Undetermined | None:
    """Decoding and transforming the items takes processor time, and the step waits for it."""
    return _inside(context, "cpu_preprocessing")


def storage_bound(context: RuleContext) -> Finding | Undetermined | None:
    """Reading the items waits for a disk, a network or a lock, and the step waits for it."""
    return _inside(context, "storage_bound")


def slow_collate(context: RuleContext) -> Finding | Undetermined | None:
    """Putting the items of a batch together takes long, and the step waits for it."""
    return _inside(context, "slow_collate")


def slow_hand_over(context: RuleContext) -> Finding | Undetermined | None:
    """Batches are made in time, and the loop waits for them to cross from the workers."""
    return _inside(context, "slow_hand_over")


def slow_sampler(context: RuleContext) -> Finding | Undetermined | None:
    """The training process itself takes long to choose the items of a batch."""
    return _inside(context, "slow_sampler")


# -- the wait ----------------------------------------------------------------------------------------------------------


class _Wait(Struct, frozen=True):
    """How long a typical step waits for data (µs), as far as that holds the device up."""

    step_us: float
    waited_us: float
    exposed_us: float
    part: float  # of the step, or of its own time
    sure: bool
    basis: str  # " (median of 20 unprofiled steps)"
    bad: bool
    sentence: str = ""


def _waiting(context: RuleContext) -> _Wait | Undetermined | None:
    """None where it does not wait long enough to be worth telling; Undetermined where that cannot be known."""
    waited, share, step_us = context.facts.data_wait_us, context.facts.data_wait_fraction, context.step_us
    if not step_us:
        return None
    waited_us = context.part_us("data_wait") if waited is None or share is None else share * step_us
    exposed_us = _exposed_us(context, step_us, waited_us)
    least_us = min(waited_us, exposed_us if exposed_us is not None else waited_us)
    part = least_us / step_us if context.own is None else context.own.of("data_wait")
    if part < context.thresholds.data_wait_notice:
        return None
    if exposed_us is None:
        why = context.withheld("breakdown") or context.withheld("idle_causes")
        again = (
            f"{why}: record it again" if why else "Run it with the profiler, which gpulab uses unless told otherwise"
        )
        return Undetermined("data_starved", "Whether the GPU has nothing to do while the loop waits for data", again)
    bad = max(part, waited_us / step_us) >= context.thresholds.data_wait_bad
    return _Wait(
        step_us,
        waited_us,
        least_us,
        part,
        not context.on_gpu or context.facts.breakdown is not None,
        _basis(context),
        bad,
        f"{'Input-bound: ' if bad else ''}{percent(part)} of {context.unit} waits on the DataLoader",
    )


def _basis(context: RuleContext) -> str:
    step = context.facts.typical_step_us
    if step is None:
        return ""
    if context.facts.step_us is not None and not (context.on_gpu and context.facts.breakdown is not None):
        return f" (median of {plural(step.count, 'untraced step')})"
    shares = context.facts.shares
    count = step.count if shares is None else shares.profiled_count
    return f" (over all {count:,} traced steps)" if count > 1 else " (in the one traced step)"


def _exposed_us(context: RuleContext, step_us: float, waited_us: float) -> float | None:
    """What the device's own work does not hide; None where nothing tells what it did meanwhile."""
    if not context.on_gpu:
        return waited_us
    if context.withheld("idle_causes") is not None:
        return None
    if context.facts.breakdown is not None:
        return context.part_us("data_wait")
    busy_pct = next((c.step_mean for c in context.facts.curves if c.name == "gpu_utilization_pct"), None)
    return None if busy_pct is None or context.withheld("breakdown") else (1 - busy_pct / 100) * step_us


def _finding(context: RuleContext, wait: _Wait, key: str, summary: str, *more: Evidence) -> Finding:
    by_step = context.unit == "each step"
    first = Evidence(
        f"{duration(wait.exposed_us)} of {context.whole} is data wait{wait.basis}{_loads(context)}",
        _longest_wait(context),
    )
    more = (*_bursts(context), *more)
    hidden_us = wait.waited_us - wait.exposed_us
    if hidden_us > context.thresholds.silence * wait.step_us:
        behind = f"the loop itself blocks for {duration(wait.waited_us)}{' per step' if by_step else ''}"
        more = (*more, Evidence(f"{behind}; the GPU hides {duration(hidden_us)} of that with earlier work"))
    settings, cure = cure_of_waiting(context, key, wait.step_us, wait.waited_us)
    line, sure = line_of_loading(context, key)
    return Finding(
        key,
        summary,
        (first, *more),
        wait.part * wait.step_us,
        "measured" if wait.sure and by_step else "likely",
        parts=("data_wait",),
        settings=settings,
        cure=cure,
        otherwise=cure_without_knob(context, key),
        source_line=line,
        names_function=bool(line) and not sure,
        source=source_of_loading(context, key),
        level="bad" if wait.bad else "notice",
    )


def _bursts(context: RuleContext) -> tuple[Evidence, ...]:
    """Where steps of a trace wait unequally: how unequally. Where it holds one batch: that others may wait less."""
    timeline = context.facts.run.timeline
    if context.unit != "each step" and timeline is not None and len(labels(timeline).rows(What.LOADER)) == 1:
        return (Evidence("this trace holds one batch: record several, for a first one takes longer than others"),)
    if not context.facts.whole_window:
        return ()
    waits_ns = context.facts.run.steps.data_wait_ns[context.facts.run.traced_rows]
    shortest, longest = duration(int(waits_ns.min()) / 1e3), duration(int(waits_ns.max()) / 1e3)
    return (Evidence(f"single steps wait from {shortest} to {longest}: the batches come in bursts"),)


def _loads(context: RuleContext) -> str:
    """Who loads the data: as the loader says, else as the iterator's class in a trace tells."""
    if (loader := context.facts.run.loader) is not None:
        return f"; num_workers={loader.num_workers}"
    words = {True: "; loaded by worker processes", False: "; loaded in the main process (num_workers=0)", None: ""}
    return words[context.facts.has_workers]


def _longest_wait(context: RuleContext) -> tuple[int, int] | None:
    """The profiled step that waits longest, where to look."""
    account = context.facts.breakdown
    if account is None or not account.steps:
        return None
    step = max(account.steps, key=lambda s: s.parts_ns["data_wait"])
    return (step.start_ns, step.end_ns) if step.parts_ns["data_wait"] else None


# -- from inside the DataLoader ----------------------------------------------------------------------------------------


def _inside(context: RuleContext, key: str) -> Finding | Undetermined | None:
    """The finding of that cause, where the step waits for data and this takes most of the time to make a batch."""
    if makes_own_batches(context):  # no DataLoader made them
        return None
    wait, inside = _waiting(context), context.facts.loading
    if not isinstance(wait, _Wait):
        return None
    if inside is None:
        what = "What inside the DataLoader takes the time: reading, decoding, or collate"
        return Undetermined(key, what, _why_not_inside(context)) if key in _BECAUSE else None
    limit = context.thresholds.loading_cause
    idle = inside.batch_us < limit * wait.step_us * max(1, context.facts.worker_count or 0)  # who is busy is late, too
    if inside.handing_over >= limit and idle:
        return _beside_making(context, wait, inside, key)
    times = times_by_cause(inside)
    of_us = inside.batch_us - waiting_for_core_us(inside)  # other programs may have taken the core
    if of_us <= 0 or times.get(key, 0.0) < max(*times.values(), limit * of_us):
        return None
    each_us = one_by_one_us(context)
    if each_us is None or key == "storage_bound":
        because = _BECAUSE[key].format(share=percent(times[key] / inside.batch_us))
    else:
        because = f"its small items are fetched one by one, {duration(each_us)} each"
    return _finding(context, wait, key, f"{wait.sentence}; {because}.", Evidence(making(inside)))


def _beside_making(context: RuleContext, wait: _Wait, inside: LoadingFacts, key: str) -> Finding | None:
    """What the loop waits for while nobody makes its batch: a sampler's line where that is seen, else the hand-over."""
    line, loader, share = sampler_line(context), context.facts.run.loader, percent(inside.handing_over)
    if loader is None or key != ("slow_hand_over" if line is None else "slow_sampler"):
        return None
    if line is not None:
        because = f"its sampler, in the main process, takes {percent(line.share)} of that"
    elif (loader.batch_tensors or 0) >= _MANY_TENSORS:
        because = f"handing over {loader.batch_tensors:,} tensors per batch, one by one, takes {share} of that"
    elif loader.num_workers:
        because = f"{share} of that for batches that are made, until the main process has them"
    else:
        return None
    return _finding(context, wait, key, f"{wait.sentence}; {because}.", Evidence(making(inside)))


_BECAUSE = {
    "cpu_preprocessing": "{share} of loading is CPU work (read, decode, transform)",
    "storage_bound": "{share} of loading is blocked on I/O or locks",
    "slow_collate": "collate takes {share} of loading",
}


def _why_not_inside(context: RuleContext) -> str:
    if context.facts.run.source == "trace":
        return "Run the training under gpulab: a trace from another tool has no DataLoader workers"
    lacking = next((m for m in context.facts.run.missing if m.key == "workers_inside"), None)
    if lacking is None:
        return "The batches of this run were not timed: run it again"
    return f"It was not timed: {lacking.reason}"


_SYMPTOM = ("data_starved",)


Cure = tuple[tuple[tuple[str, str], ...], str]  # knobs, and words

_UNKNOWN_MACHINE = 8  # workers proposed at most where the usable cores are not known
_LEAST_COMPUTING = 0.01  # ours, of the step: as much as can be told from nothing
_NO_ROOM = "Host memory is nearly full: more workers or a cache would not fit."
_COLLATED = (
    "Vectorize collate_fn: torch.stack, or one pad_sequence per batch, instead of Python loops over items. Move "
    "per-item work into __getitem__."
)
_STACKED = (
    "Let __getitem__ return a few large tensors or NumPy arrays, not lists of numbers: PyTorch collates each part "
    "separately. Or pass a collate_fn that uses torch.stack."
)

_SMALL_ITEM_US = 20.0  # ours: to index, to collate and two calls of Python take 5 to 10 µs of an item
_WHOLE_BATCHES = (
    "Index a whole batch at once: DataLoader(dataset, batch_size=None, sampler=BatchSampler(RandomSampler(dataset), "
    "batch_size, drop_last)) gives __getitem__ all rows of a batch, and collates nothing. A TensorDataset takes it so."
)
_MANY_TENSORS = 16  # ours: as many as a few fields give have a cost that packing hardly changes
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


def cure_of_waiting(context: RuleContext, key: str, step_us: float, waited_us: float) -> Cure:
    """The knobs and the words for the finding of that key; the typical step and its wait in µs.

    No knob keeps a batch from being put together anew, so `slow_collate` is never told to keep its items.
    """
    loader, workers = context.facts.run.loader, context.facts.worker_count
    inside = context.facts.loading
    if key in ("slow_hand_over", "slow_sampler"):
        here = key == "slow_hand_over" and inside is not None and inside.batch_us < waited_us
        return (("workers", "0"),) if here else (), cure_without_knob(context, key)
    collating = _of_whole_batches(context, key)
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
    making = inside.batch_us if inside is not None else waited_us if not workers else workers * step_us
    wanted = min(math.ceil(making / computing) + 1, room)
    if wanted > workers:
        return _more_workers(wanted, collating)
    if collating:
        return (), collating
    cause = "no CPU core is left for another worker" if room <= workers else "more would not help"
    return (("cache", "on"),), (
        f"It already uses {plural(workers, 'worker')} and {cause}. Make each item cheaper to load, or cache the items "
        "(decoded files, or in memory with the dataset cache)."
    )


def cure_without_knob(context: RuleContext, key: str) -> str:
    """Where what `cure_of_waiting` sets is predicted to bring nothing."""
    if whole := _of_whole_batches(context, key):
        return whole
    if key == "slow_sampler":
        return _CHOOSING
    if key == "slow_hand_over":
        loader = context.facts.run.loader
        return _PACKING if loader is not None and (loader.batch_tensors or 0) >= _MANY_TENSORS else _CROSSING
    return "No DataLoader setting is predicted to help: make each item and batch cheaper to load."


def one_by_one_us(context: RuleContext) -> float | None:
    """Of an item of a map-style dataset, where that is hardly more than calling Python for it; else None."""
    inside, loader = context.facts.loading, context.facts.run.loader
    if inside is None or not inside.items_per_batch or loader is None or loader.iterable:
        return None
    each_us = (inside.read_us + inside.transform_us + inside.collate_us) / inside.items_per_batch
    return each_us if each_us <= _SMALL_ITEM_US else None


def _of_whole_batches(context: RuleContext, key: str) -> str:
    """How to make a batch at once, where its items are what takes the time; else nothing."""
    if key in ("slow_collate", "cpu_preprocessing") and one_by_one_us(context) is not None:
        return _WHOLE_BATCHES
    loader = context.facts.run.loader
    by_torch = loader is not None and loader.own_collate is False
    return "" if key != "slow_collate" else _STACKED if by_torch else _COLLATED


def _more_workers(wanted: int, collating: str) -> Cure:
    """`collating`: what to do first, where putting batches together is the cause."""
    processes = "1 worker process" if wanted == 1 else f"{wanted} worker processes"
    how = f"Use {processes}: DataLoader(…, num_workers={wanted}, persistent_workers=True)."
    return (("workers", str(wanted)),), f"{collating} If that is not enough: {decapitalized(how)}" if collating else how


def _room_for_workers(context: RuleContext) -> int:
    """Usable cores: more processes than that take time from each other, unless they wait for something else."""
    cores, inside = context.facts.run.environment.usable_cores, context.facts.loading
    if cores is None or (inside is not None and mostly_waits(inside)):
        return max(_UNKNOWN_MACHINE, int(cores or 0))
    return max(1, math.floor(cores))


_NOT_MAKING = ("slow_hand_over", "slow_sampler")
_PART_TOLD, _WAIT_TOLD = 0.01, 0.05  # ours, of a batch's time: a smaller part, or wait, is left out of the sentence


def making(inside: LoadingFacts) -> str:
    """How long a batch takes to make and what that goes to, in words."""
    return f"loading one batch takes {duration(inside.batch_us)} (median of {sampled(inside)}): {_split(inside)}"


def sampled(inside: LoadingFacts) -> str:
    """Of how many batches the figures speak, and out of how many."""
    few = f" timed, out of {inside.of_batches:,}" if inside.batches < inside.of_batches else ""
    return f"{inside.batches:,}{few}"


def _split(inside: LoadingFacts) -> str:
    parts = {
        "read": inside.read_us,
        "transform": inside.transform_us,
        "collate": inside.collate_us,
        "pin memory": inside.pin_us or 0.0,
    }
    words = ", ".join(f"{name} {duration(us)}" for name, us in parts.items() if us >= _PART_TOLD * inside.batch_us)
    waits = {
        "blocked on I/O or locks": times_by_cause(inside)["storage_bound"],
        "waiting for a free core": waiting_for_core_us(inside),
    }
    shares = {what: us / inside.batch_us for what, us in waits.items()}
    waiting = [f"{percent(share)} is {what}" for what, share in shares.items() if share >= _WAIT_TOLD]
    return f"{words}. Of this, {' and '.join(waiting)}" if waiting else words


# -- the line of code --------------------------------------------------------------------------------------------------


def sampler_line(context: RuleContext) -> LineShare | None:
    """The line that surely takes most of the loop's wait, in a sampler of the user's: the loop asks from elsewhere."""
    account, run, waits = context.facts.breakdown, context.facts.run, waiting_times(context)
    if run.loader is None or not run.loader.sampler_line or account is None:
        return None
    return line_only_at(run, waits, subtract(account.host_covered, waits))


def line_of_loading(context: RuleContext, key: str) -> tuple[str, bool]:
    """The line, or the loop, that surely takes most of the time to make batches, in whichever process makes them; and
    True.

    Where none surely does, the function that does the part that takes longest; and False: which of its lines is not
    known. Empty where that is no code of the user's.
    """
    looks = context.facts.run.loading_looks
    if key in _NOT_MAKING:
        line = sampler_line(context)
        return (str(line.place), True) if line is not None else (_written(context, key), False)
    if looks is None:
        sampled = _sampled(context)
        return (sampled, True) if sampled else (_written(context, key), False)
    place = hot_line_of_loading(context.facts.run, collating=key == "slow_collate")
    return (str(place), True) if place is not None else (_written(context, key), False)


def source_of_loading(context: RuleContext, key: str) -> tuple[SourceLine, ...]:
    """The lines around that line, each with its share of the time to make batches; empty where no line is named."""
    run = context.facts.run
    place = None if key in _NOT_MAKING else hot_line_of_loading(run, collating=key == "slow_collate")
    return () if place is None else lines_beside_cost(run, place, *loading_lines(run, collating=key == "slow_collate"))


def _written(context: RuleContext, key: str) -> str:
    loader, inside = context.facts.run.loader, context.facts.loading
    if loader is None or inside is None:
        return ""
    if key in ("slow_collate", "slow_hand_over"):
        return loader.collate_line
    longest = max(inside.read_us, inside.transform_us, inside.collate_us)
    if longest == inside.collate_us:
        return loader.collate_line
    return loader.items_line if longest == inside.read_us else loader.transform_line


def _sampled(context: RuleContext) -> str:
    if context.facts.worker_count != 0:
        return ""
    return context.python_line_at(waiting_times(context))


def waiting_times(context: RuleContext) -> Intervals:
    """When the training thread is in the DataLoader, within the profiled steps."""
    timeline, account = context.facts.run.timeline, context.facts.breakdown
    if timeline is None or account is None or not account.steps:
        return EMPTY
    return intersect(labels(timeline).loading, account.host_covered)


_KEEP_WORKERS = (
    "Keep the workers alive between epochs: DataLoader(…, persistent_workers=True), with one iterator per epoch."
)
_MAKE_ONCE_AND_KEEP = (
    "Create the DataLoader once, before the loop (in Lightning leave reload_dataloaders_every_n_epochs at 0): its "
    f"workers end with it. Then {decapitalized(_KEEP_WORKERS).replace('the workers', 'them', 1)}"
)
_MOST_STEPS = 0.5  # ours: more beginnings than that are no epochs, but `next(iter(loader))` in the loop


def worker_restart(context: RuleContext) -> Finding | Undetermined | None:
    """Workers are started again for each epoch, and the first step of it waits until they have a batch.

    Counted is what those steps wait longer than others do, without the very first start, spread over all steps.
    """
    run, loader, step = context.facts.run, context.facts.run.loader, context.step_us
    stay = loader is not None and loader.persistent_workers and not loader.remade  # else they end with their loader
    if not step or not len(run.steps) or context.facts.worker_count == 0 or stay:
        return None
    fresh = np.flatnonzero((run.steps.flags & StepFlag.EPOCH_START) != 0)
    whole = (run.steps.flags & StepFlag.PARTIAL) == 0
    again = fresh[whole[fresh]][1:] if len(fresh) and fresh[0] == 0 else fresh[whole[fresh]]
    if not len(again):
        return None
    if len(fresh) > _MOST_STEPS * len(run.steps):
        return None
    others = np.setdiff1d(np.flatnonzero(whole), fresh)
    usual_ns = float(np.median(run.steps.data_wait_ns[others])) if len(others) else 0.0
    making_us = context.facts.loading.batch_us if context.facts.loading is not None else 0.0
    longer_us = np.maximum(0.0, (run.steps.data_wait_ns[again] - usual_ns) / 1e3 - making_us)
    cost_us = float(longer_us.sum()) / len(run.steps)
    whole_us = max(context.whole_us or 0.0, step + cost_us)
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
    return Finding(
        "worker_restart",
        f"Each epoch starts with a wait of {each}, because the DataLoader restarts its workers.",
        (
            Evidence(
                f"{plural(len(again), 'time')} in {len(run.steps):,} steps the first batch of an epoch came {each} "
                f"later than others: {duration(cost_us)} per step, {percent(cost_us / whole_us)}",
                (int(run.steps.start_ns[slowest]), int(run.steps.end_ns[slowest])),
            ),
        ),
        cost_us,
        "measured",
        parts=(f"{BETWEEN}/worker_restart",),
        settings=() if loader.remade else (("persistent_workers", "on"),),
        cure=_MAKE_ONCE_AND_KEEP if loader.remade else _KEEP_WORKERS,
    )


def new_iterators(context: RuleContext) -> Finding | None:
    """Nearly each step starts its loader anew, as `next(iter(loader))` does."""
    run, loader, step_us = context.facts.run, context.facts.run.loader, context.step_us
    wait, inside = context.facts.data_wait_us, context.facts.loading
    fresh = (run.steps.flags[context.facts.selection.rows] & StepFlag.EPOCH_START) != 0
    if not step_us or loader is None or wait is None or not len(fresh) or fresh.mean() <= _MOST_STEPS:
        return None
    cost_us = max(0.0, wait.median - (inside.batch_us if inside is not None else 0.0))
    if cost_us < context.thresholds.data_wait_notice * step_us:
        return None
    anew = f"starts {plural(loader.num_workers, 'worker')} and draws" if loader.num_workers else "draws"
    making = f"; making a batch takes {duration(inside.batch_us)}" if inside is not None else ""
    return Finding(
        "new_iterators",
        f"Each step makes a new iterator of its DataLoader: that takes {percent(cost_us / step_us)} of each step.",
        (Evidence(f"{int(fresh.sum()):,} of {len(fresh):,} steps do; each {anew} the order of all items{making}"),),
        cost_us,
        "measured" if inside is not None else "likely",
        parts=("data_wait",),
        cure="Make it once: loop over the loader itself (for batch in loader), or call iter(loader) before the loop "
        "and anew only at its end. Where an epoch is one batch, keep that batch.",
        source_line=context.line_at(waiting_times(context)),
    )


_LESSON = "03_starving_gpu"


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
