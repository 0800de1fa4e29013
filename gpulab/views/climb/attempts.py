"""The ladder of a climb as a table: one line per try, times by its blocks, the rest by its profiled run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpulab.analysis.facts import Facts
from gpulab.formatting import duration, durations, factor, gib, percent, speed_within
from gpulab.tuning.bench import memory_peak_bytes
from gpulab.tuning.climb_record import Attempt, Climb
from gpulab.tuning.record import Comparison, Side
from gpulab.views.layout import Column, Section, numbers
from gpulab.views.wording import plain

NONE = "–"


def ladder(climb: Climb) -> Section:
    """From the baseline on."""
    assert climb.written is not None
    below = [rung.comparison.a for rung in climb.rungs[:1] if rung.comparison is not None]
    sides = [(*below, climb.written)[0], *(r.comparison.b if r.comparison is not None else None for r in climb.rungs)]
    ran = [side for side in sides if side is not None]
    per_sample = all(_us(side, per_sample=True) for side in ran if _us(side, per_sample=False))
    step = _common_loss(ran)
    columns = (
        Column("setting"),
        *numbers("a sample" if per_sample else "a step", "busy", "data wait", "memory", "loss", "speedup"),
        Column("", "wrap"),
    )
    cells = [("baseline", NONE, "reference"), *((_label(r), _gain(r), result(r)) for r in climb.rungs)]
    took = [_time(sides[0], None, per_sample), *(_time(None, r.comparison, per_sample) for r in climb.rungs)]
    rows = (
        (label, time, *_figures(side, step), gain, words)
        for (label, gain, words), side, time in zip(cells, sides, took, strict=True)
    )
    return Section.table("The ladder", columns, rows, _notes(climb, step), wide=True)


def _time(side: Side | None, comparison: Comparison | None, per_sample: bool) -> str:
    """Of a try what it was compared with and what it took, both from the same blocks: "17.1 → 13.5 ms"."""
    if comparison is not None and _in_turn(comparison):
        before, after = (_us(one, per_sample=per_sample) for one in (comparison.a, comparison.b))
        if before and after:
            return _change(before, after)
    us = _us(side, per_sample=per_sample) if side is not None else None
    return NONE if us is None else duration(us)


def _change(before_us: float, after_us: float) -> str:
    """Two times with their unit once: "17.1 → 13.5 ms"."""
    before, after = durations(before_us, after_us)
    return f"{before.rpartition(' ')[0]} → {after}"


def _in_turn(comparison: Comparison) -> bool:
    """Whether its figures are those of blocks, and of enough of them for an interval."""
    return comparison.evidence == "interleaved" and comparison.ratio is not None and comparison.interval is not None


def result(rung: Attempt) -> str:
    """Whether it was kept, why, and how sure the two gains are."""
    comparison, prediction = rung.comparison, rung.prediction
    ranges = []
    if comparison is not None and comparison.evidence == "interleaved" and comparison.interval is not None:
        ranges.append(f"measured {_range(comparison.interval)}×")
    if prediction is not None and prediction.interval is not None and prediction.interval[0] > 0:
        ranges.append(f"predicted {_range(prediction.interval)}×")
    words = plain(f"{'kept' if rung.kept else 'not kept'}: {rung.words}")
    return f"{words} ({', '.join(ranges)})" if ranges else words


def origin(rung: Attempt) -> str:
    """What stands below a try where it is a row among others."""
    return f"rung {rung.number} of a climb, {result(rung)}"


def busy_fraction(facts: Facts | None) -> float | None:
    """Share of the typical step in which the device works; of a CPU, in which it computes for the training."""
    if facts is None or facts.breakdown is None or facts.shares is None:
        return None
    return facts.shares.of("compute") if facts.breakdown.busy_fraction is None else 1 - facts.shares.idle


def data_wait_fraction(facts: Facts | None) -> float | None:
    """Share of the typical step in which it waits for the next batch; on a GPU only what its work does not hide."""
    shares = facts.shares if facts is not None else None
    return None if shares is None else shares.share["data_wait"]


def _notes(climb: Climb, step: int | None) -> tuple[str, ...]:
    facts = climb.written.facts if climb.written is not None else None
    on_gpu = facts is not None and facts.run.device.kind == "cuda"
    busy = "in which the GPU works" if on_gpu else "that is spent on computing"
    notes = [
        "Each line adds its own setting to everything kept so far. Its times: without and with that setting, in "
        "interleaved blocks. In brackets: the 95 % interval of the speedup, and the predicted one.",
        f"The rest is from one traced run each. Busy: share of the step {busy}; data wait: share of the step; "
        "memory: the peak.",
    ]
    if step is not None:
        notes.append(f"Loss: that of step {step + 1}, from the same start.")
    return tuple(notes)


def _label(rung: Attempt) -> str:
    return plain(rung.label) if rung.back else f"+ {plain(rung.label)}"


def _gain(rung: Attempt) -> str:
    comparison = rung.comparison
    if comparison is None or not comparison.times_as_fast or not _in_turn(comparison):
        return NONE
    return factor(comparison.times_as_fast)


def _range(interval: tuple[float, float]) -> str:
    """As times as fast, with as many decimals as keep both ends apart."""
    low, high = interval
    return speed_within((low * high) ** 0.5, interval)[1]


def _figures(side: Side | None, step: int | None) -> tuple[str, ...]:
    """Of its profiled run."""
    if side is None:
        return (NONE,) * 4
    peak = memory_peak_bytes(side.facts)
    divided = side.facts if side.facts is not None and side.facts.few_steps is None else None
    busy, waits = busy_fraction(divided), data_wait_fraction(divided)
    return (
        NONE if busy is None else percent(busy),
        NONE if waits is None else percent(waits),
        NONE if peak is None else gib(peak),
        _loss_at(side, step),
    )


def _us(side: Side, *, per_sample: bool) -> float | None:
    """By its blocks; of a side without any, by its run with the trace."""
    facts = side.facts
    blocks = side.us_per_sample if per_sample else side.us_per_step
    if blocks is not None or facts is None or side.blocks:
        return blocks
    if per_sample:
        return 1e6 / facts.samples_per_s if facts.samples_per_s else None
    return facts.step_us.median if facts.step_us is not None else None


def _common_loss(sides: Sequence[Side]) -> int | None:
    """The last step of which all sides that ran have a loss; the very last of a run may have been cut off."""
    lengths = [len(side.losses) for side in sides if side.losses]
    last = min(lengths) - 2 if lengths else -1
    return last if last >= 0 else None


def _loss_at(side: Side, step: int | None) -> str:
    if step is None or not 0 <= step < len(side.losses):
        return NONE
    value = side.losses[step]
    return f"{value:.4g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "infinite"
