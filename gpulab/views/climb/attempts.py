"""The ladder of a climb as a table: one line per try, with the figures of the cell as it was in that try."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpulab.analysis.facts import Facts
from gpulab.formatting import duration, factor, percent, size, speed_within
from gpulab.tuning.climb.record import Attempt, Climb
from gpulab.tuning.record import Side
from gpulab.views.comparison.table import memory_peak_bytes
from gpulab.views.layout import Column, Row, Section, numbers
from gpulab.views.wording import PARTS, plain

NONE = "–"


def ladder(climb: Climb) -> Section:
    """From the cell as written on, its times drawn as well."""
    assert climb.written is not None
    below = [rung.comparison.a for rung in climb.rungs[:1] if rung.comparison is not None]
    sides = [(*below, climb.written)[0], *(r.comparison.b if r.comparison is not None else None for r in climb.rungs)]
    ran = [side for side in sides if side is not None]
    per_sample = all(_us(side, per_sample=True) for side in ran if _us(side, per_sample=False))
    step = _common_loss(ran)
    columns = (
        Column("setting"),
        *numbers("a sample" if per_sample else "a step", "busy", "waits", "memory", "loss", "gain"),
        Column("", "wrap"),
    )
    cells = [("as written", NONE, "the reference"), *((_label(r), _gain(r), result(r)) for r in climb.rungs)]
    took = [_us(side, per_sample=per_sample) or 0.0 if side is not None else 0.0 for side in sides]
    longest = max(took) or 1.0
    rows = tuple(
        Row((label, *_figures(side, per_sample, step), gain, words), us / longest, PARTS["compute"].colour)
        for (label, gain, words), side, us in zip(cells, sides, took, strict=True)
    )
    return Section("The ladder", columns, rows, _notes(climb, step), wide=True)


def result(rung: Attempt) -> str:
    """Whether it was kept, why, and how sure the two gains are."""
    comparison, prediction = rung.comparison, rung.prediction
    ranges = []
    if comparison is not None and comparison.evidence == "interleaved" and comparison.interval is not None:
        ranges.append(f"measured {_range(comparison.interval)}")
    if prediction is not None and prediction.interval is not None and prediction.interval[0] > 0:
        ranges.append(f"predicted {_range(prediction.interval)}")
    words = plain(f"{'kept' if rung.kept else 'not kept'}: {rung.words}")
    return f"{words} ({', '.join(ranges)})" if ranges else words


def busy_fraction(facts: Facts | None) -> float | None:
    """Share of the profiled steps in which the device works; of a CPU, in which it computes for the training."""
    account = facts.breakdown if facts is not None else None
    if account is None:
        return None
    return account.busy_fraction if account.busy_fraction is not None else account.typical_share("compute")


def _notes(climb: Climb, step: int | None) -> tuple[str, ...]:
    facts = climb.written.facts if climb.written is not None else None
    on_gpu = facts is not None and facts.run.device.kind == "cuda"
    busy = "in which the GPU works" if on_gpu else "that is spent on computing"
    notes = [
        f"Each line has everything kept so far and its own setting on top. Busy: share of the step {busy}; waits: "
        "share in which it waits for the next batch; memory: the peak.",
        "Gain: how many times as fast as what was kept before. In brackets its 95 % interval, and the predicted one.",
    ]
    if step is not None:
        notes.append(f"Loss: that of step {step + 1}, from the same start.")
    return tuple(notes)


def _label(rung: Attempt) -> str:
    return plain(rung.label) if rung.back else f"+ {plain(rung.label)}"


def _gain(rung: Attempt) -> str:
    comparison = rung.comparison
    if comparison is None or not comparison.ratio or comparison.evidence != "interleaved":
        return NONE
    return f"{factor(1 / comparison.ratio)}×"


def _range(interval: tuple[float, float]) -> str:
    """As times as fast, with as many decimals as keep both ends apart."""
    low, high = interval
    return f"{speed_within((low * high) ** 0.5, interval)[1]}×"


def _figures(side: Side | None, per_sample: bool, step: int | None) -> tuple[str, ...]:
    if side is None:
        return (NONE,) * 5
    us, peak = _us(side, per_sample=per_sample), memory_peak_bytes(side)
    busy = busy_fraction(side.facts)
    waits = side.facts.data_wait_fraction if side.facts is not None else None
    return (
        NONE if us is None else duration(us),
        NONE if busy is None else percent(busy),
        NONE if waits is None else percent(waits),
        NONE if peak is None else size(peak),
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
