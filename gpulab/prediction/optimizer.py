"""The optimizer's share of a step: one kernel for all parameters, or a step only every k-th time.

How many bytes an update moves, fused and not, says `analysis.optimizer_bytes`. What moving them costs is read off the
optimizer's own operators. On a CPU `aten::mul_` in place reads and writes 8 bytes of each parameter: a fused Adam moves
28, so it takes 3.5 times as long as one `mul_` over all parameters, less what it costs to begin each of those
operators: a fused step begins once. On a GPU the work that the update launches takes less time as it moves less.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.optimizer_work import ADD, SCALE, OptimizerWork, bytes_of, optimizer_work
from gpulab.formatting import duration, percent
from gpulab.intervals import covers
from gpulab.prediction.baseline import Baseline, Refused, at_least, is_on
from gpulab.prediction.calibration import (
    ACCUMULATE_SD,
    ASIDE_HOST,
    BEGIN_US,
    FUSED_DOUBT,
    FUSED_HOST,
    FUSED_SD,
    OTHER_BYTES,
    PER_TENSOR_US,
    PYTHON_US,
)
from gpulab.prediction.prediction import PriorEvidence
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Projection
from gpulab.run import Category, Int64
from gpulab.timeline import spans

ASIDE_BYTES = bytes_of(ADD)  # the knob's own sum of gradients


class Inside(Struct, frozen=True):
    """An optimizer's step, per step of training; `time_us` is of the unprofiled ones.

    `pass_us` is one operator's pass over all parameters on a CPU, None where none was seen, and `pass_bytes` what it
    moves of each.
    """

    work: OptimizerWork
    time_us: float
    pass_us: float | None
    pass_bytes: int
    tensors: float


def _inside(today: Baseline) -> Inside:
    """Raises Refused where the trace shows no optimizer."""
    timeline, account, time = today.run.timeline, today.facts.breakdown, today.facts.optimizer_us
    work = None if timeline is None or account is None else optimizer_work(timeline, account)
    if timeline is None or account is None or time is None or work is None or not len(work.step_times):
        raise Refused("the trace has no optimizer step")
    plain = work.name == "SGD" and not work.has_momentum
    name = "aten::add_" if plain else "aten::mul_"
    once = 2 if work.name == "AdamW" else 1  # the decay and the mean of squares; the others have one
    windows = account.host_windows
    rows = np.flatnonzero(spans.in_category(timeline, Category.CPU_OP) & spans.named(timeline, spans.among(name)))
    start = timeline.start_ns[rows]
    rows = rows[covers(work.step_times, start) & covers(windows, start)]
    moving = _moving_us(timeline.duration_ns[rows], len(account.steps))
    return Inside(
        work=work,
        time_us=time.median,
        pass_us=None if moving is None else moving / once,
        pass_bytes=bytes_of(ADD if plain else SCALE),
        tensors=len(rows) / once / len(account.steps),
    )


def _moving_us(duration_ns: Int64, steps: int) -> float | None:
    """Of a step's operators, each at its median over the steps: what interrupts one for milliseconds does not count.

    The cheapest of them tells what it costs to begin one, which is taken off each. They come in the same order in each
    step; where their number differs, the median operator stands for all.
    """
    if not len(duration_ns):
        return None
    alike = len(duration_ns) % steps == 0
    each = np.median(duration_ns.reshape(steps, -1), axis=0) if alike else np.median(duration_ns, keepdims=True)
    count = 1 if alike else len(duration_ns) / steps
    begin = min(float(each.min()), BEGIN_US * 1e3)
    return float((each - begin).sum()) * count / 1e3


def fused_optimizer(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """One kernel for all parameters."""
    inside = _inside(projection.today)
    fused, name = inside.work.style == "fused", inside.work.name
    if is_on(value) == fused:
        return projection.as_it_is(f"the optimizer is already {'fused' if fused else 'not fused'}")
    if fused:
        raise Refused("a fused optimizer does not show what an unfused one takes")
    moved = inside.work.update_bytes
    if moved is None:
        raise Refused(f"the bytes that a fused {name} moves are not known")
    share = moved.fused_fraction
    if projection.today.on_gpu:
        changes = _scaled(projection.today, inside, device=share, host=FUSED_HOST)
        words = f"a fused {name} moves {percent(share)} of the bytes, with few launches"
        return replace(projection, changes=projection.changes.and_also(changes)).doubted(FUSED_SD, words)
    if inside.pass_us is None:
        raise Refused(f"the operators of {name} do not show the time of one pass over its parameters")
    after = min(inside.time_us, _overhead_us(inside) + moved.fused_bytes / inside.pass_bytes * inside.pass_us)
    words = (
        f"the optimizer takes {duration(inside.time_us)} of a step; fused, about {duration(after)}: one pass over the "
        "parameters"
    )
    step = projection.today.step.median
    spread = [(step - inside.time_us + after * by) / (step - inside.time_us + after) for by in FUSED_DOUBT]
    saved = replace(projection, saved_us=projection.saved_us + inside.time_us - after)
    return saved.doubted(0.02, words).reached(min(1.0, spread[0]), spread[1])


def accumulate(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """The optimizer steps every k-th time; the others put their gradients aside."""
    rounds = at_least(1, value)
    if rounds == 1:
        return projection.as_it_is("each batch is already a step")
    inside = _inside(projection.today)
    kept = 1 - 1 / rounds
    aside = ASIDE_BYTES / _moved_bytes(inside.work)
    words = f"the optimizer ({duration(inside.time_us)} of a step) runs once per {rounds} batches"
    if projection.today.on_gpu:
        changes = _scaled(projection.today, inside, device=1 / rounds + aside, host=1 / rounds + ASIDE_HOST)
        return replace(projection, changes=projection.changes.and_also(changes)).doubted(ACCUMULATE_SD, words)
    put_us = ASIDE_BYTES / inside.pass_bytes * inside.pass_us if inside.pass_us is not None else aside * inside.time_us
    put_us += _overhead_us(inside)
    saved = kept * inside.time_us - put_us
    return replace(projection, saved_us=projection.saved_us + saved).doubted(ACCUMULATE_SD, words)


def _overhead_us(inside: Inside) -> float:
    """What one call for all parameters takes on a CPU, however small they are."""
    return PYTHON_US + PER_TENSOR_US * inside.tensors


def _moved_bytes(work: OptimizerWork) -> int:
    """Of each parameter by the update as it is."""
    if work.update_bytes is None:
        return OTHER_BYTES
    return work.update_bytes.fused_bytes if work.style == "fused" else work.update_bytes.unfused_bytes


def _scaled(today: Baseline, inside: Inside, *, device: float, host: float) -> Changes:
    """The work that the optimizer launched, and the host's time in it, as shares that remain."""
    work, held = today.work, inside.work.step_times
    launched = work.call >= 0
    theirs = work.rows[launched][covers(held, work.timeline.start_ns[work.call[launched]])]
    factor = np.ones(len(work.timeline))
    factor[theirs] = min(1.0, device)
    return Changes(device_factor=factor, host=((held, min(1.0, host)),))
