"""Whether a try of a climb is kept: only where it is faster for certain and the training is the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from msgspec import Struct

from gpulab.formatting import decapitalized, factor, percent, speed_within
from gpulab.knobs.catalogue import KNOBS
from gpulab.thresholds import DEFAULT
from gpulab.tuning.climb.record import Outcome
from gpulab.tuning.record import Comparison, LossComparison, Side
from gpulab.verdict import LEAST_EFFECT, TOO_FEW

WORTH_HAVING = 0.1  # of the time: a gain that may be so large is looked for a second time
KEEPING = ("same", "within the band")


class Judged(Struct, frozen=True):
    """What becomes of a try, and why: a sentence without a full stop."""

    outcome: Outcome
    words: str


def spoiled(comparison: Comparison, names: Collection[str]) -> Judged | None:
    """What one full run of a try is enough to tell; None: it takes blocks. `names` are the knobs that it set."""
    if comparison.b.failure:
        return Judged("failed", comparison.b.failure)
    broken = broken_loss(comparison.a.losses, comparison.b.losses)
    if broken:
        return Judged("loss broken", broken)
    idle = [c for c in comparison.b.checks if c.name in names and c.state == "no effect"]
    if idle and len(idle) == len(names):
        return Judged("no effect", f"it had no effect: {idle[0].evidence}")
    return None


def judged(
    comparison: Comparison,
    loss: LossComparison | None,
    names: Collection[str],
    allow: Collection[str],
    memory_full: float = DEFAULT.memory_full,
) -> Judged:
    """The verdict on one try. `names` are the knobs it set, `allow` those that may change the training.

    From `memory_full` on, a fraction of the device's memory, a faster setting is not kept.
    """
    early = spoiled(comparison, names)
    if early is not None:
        return early
    if comparison.evidence == "sequential" and comparison.verdict != "not comparable":
        return Judged("unsure", "undecided, the budget left no time for interleaved blocks")
    if comparison.verdict != "faster":
        return _not_faster(comparison)
    full = _memory_full(comparison.b, memory_full)
    if full:
        return Judged("memory", full)
    if loss is None or loss.verdict == "not measurable":
        return _not_known(names, allow)
    if loss.verdict not in KEEPING:
        words = decapitalized(loss.words).rstrip(".")
        if set(names) & set(allow):
            return Judged("kept", f"faster; {words}: kept because --allow says so")
        return Judged("loss moved", f"faster, but {words}; --allow {','.join(names)} keeps it all the same")
    return Judged("kept", f"faster, {_of_loss(loss)}")


def unsure(comparison: Comparison) -> bool:
    """Undecided, and the measurements lie too far apart to exclude a gain worth having."""
    if comparison.verdict != "undecided":
        return False
    return comparison.interval is None or comparison.pairs < TOO_FEW or comparison.interval[0] < 1 - WORTH_HAVING


def broken_loss(a: Sequence[float], b: Sequence[float]) -> str:
    """From which step on B's loss is not a number, or infinite, where A's is finite; empty where it is not.

    The last step of a run may have been cut off before its loss.
    """
    for step, (of_a, of_b) in enumerate(zip(a[:-1], b[:-1], strict=False), start=1):
        if math.isfinite(of_a) and not math.isfinite(of_b):
            kind = "not a number (NaN)" if math.isnan(of_b) else "infinite"
            return f"the loss is {kind} from step {step} on"
    return ""


def _not_faster(comparison: Comparison) -> Judged:
    if comparison.verdict == "slower":
        return Judged("slower", "it is slower")
    if comparison.verdict == "not comparable" or comparison.ratio is None:
        why = comparison.notes[0] if comparison.notes else "the two cannot be compared"
        return Judged("not comparable", why.rstrip("."))
    if comparison.verdict == "no measurable difference":
        return Judged("no gain", "no measurable difference")
    if comparison.interval is None or comparison.pairs < TOO_FEW:
        return Judged("unsure", f"undecided, too few pairs of blocks ({comparison.pairs}) to tell")
    fastest = 1 / comparison.interval[0]
    if fastest < 1 + LEAST_EFFECT:
        return Judged("no gain", f"the speedup is at most {factor(fastest)}×")
    middle, around = speed_within(comparison.ratio, comparison.interval)
    return Judged("unsure", f"undecided: {middle}× speedup, 95 % interval {around}")


def _memory_full(side: Side, memory_full: float) -> str:
    memory = side.facts.run.memory if side.facts is not None else None
    if memory is None or not memory.total_bytes:
        return ""
    peak = memory.peak_reserved_bytes or memory.peak_allocated_bytes or 0
    share = peak / memory.total_bytes
    if share < memory_full:
        return ""
    return f"it takes {percent(share)} of the device's memory: the next larger batch would not fit"


def _not_known(names: Collection[str], allow: Collection[str]) -> Judged:
    """A loss that cannot be compared allows only what cannot change it."""
    changing = [name for name in names if name not in KNOBS or not KNOBS[name].same_training]
    if not changing:
        return Judged("kept", "faster; the loss could not be compared, and this changes only how data arrives")
    if set(changing) <= set(allow):
        return Judged("kept", "faster; the effect on the loss could not be measured: kept because --allow says so")
    words = "faster, but whether the loss stays the same could not be measured"
    return Judged("loss moved", f"{words}; --allow {','.join(changing)} keeps it all the same")


def _of_loss(loss: LossComparison) -> str:
    if loss.verdict == "same":
        return "and the loss is the same"
    return f"and the loss moves no further than with another seed ({loss.seeds + 1} seeds)"
