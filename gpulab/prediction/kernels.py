"""Other kernels for the same work: attention without its large matrices, a compiled model, another memory layout."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from gpulab.formatting import duration, percent
from gpulab.intervals import covers
from gpulab.prediction.baseline import Refused, Today, is_on, training_spans_us
from gpulab.prediction.evidence import Known
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Plan
from gpulab.run import Timeline
from gpulab.timeline import spans

SLOWER = 1.07  # definitions.md, "Anchors": compiling made an 8B model 0.94× as fast
FUSED_AWAY = 0.3  # of the time of kernels that only move data remains where they are fused
# On a CPU a compiler changes everything but matrix products, data and the optimizer; measured there: 0.2 of the time
# where cheap operations take all of it, and 280 µs more in a step of 570 µs, for checks before each call.
CPU_FUSED_AWAY = 0.1
CPU_CHECKS_US = 500.0
CPU_LAYOUT = (0.2, 2.0)  # of what convolutions and pooling take; measured 0.3 and 1.5 of steps that hold little else
CPU_ROUGHLY = 1.1  # what no operation of a step explains
TELLS = 1.25  # a range further than this to both sides of 1 says nothing
GPU_LAYOUT_GAIN = 0.8  # definitions.md, "Anchors": 8 to 35 % on Volta

_CONVOLUTION = re.compile(r"conv(olution|2d)", re.IGNORECASE)
_IMAGE = re.compile(r"conv(olution|2d)|pool|batch_?norm|upsample|interpolate", re.IGNORECASE)
_PRODUCT = re.compile(r"aten::(linear|addmm|mm|bmm|baddbmm|matmul)$")
_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"


def attention(plan: Plan, value: str, known: Known) -> Plan:
    """Flash or memory-efficient attention writes no matrix of all pairs: what only moves it falls away."""
    timeline = plan.today.run.timeline
    plain = None if timeline is None else spans.named(timeline, lambda n: n == _MATH_ATTENTION)
    if timeline is None or plain is None or not plain.any():
        raise Refused("no attention by its plain formula was seen in the trace")
    if value == "math":
        return plan.doubted(0.0, "it is computed by its plain formula already")
    if not plan.today.on_gpu:
        share = min(0.9, training_spans_us(plan.today, plain) / plan.today.step.median)
        words = "attention by its plain formula takes part of a step; without large matrices it takes less of it"
        return _ranged(plan, 1 - share, 1.02, words)
    work = plan.today.work
    launched = work.call >= 0
    inside = np.zeros(len(work.rows), dtype=bool)
    inside[launched] = covers(spans.covered(timeline, plain), timeline.start_ns[work.call[launched]])
    backward = np.array(["softmax" in n.lower() and "backward" in n.lower() for n in work.names_of(work.rows)], bool)
    low = _played_ratio(plan, (inside & ~work.of("matrix")) | backward, 0.0)
    return _ranged(plan, low, 1.0, "kernels that only write and read the matrix of all pairs fall away")


def compiled(plan: Plan, value: str, known: Known) -> Plan:
    """A sign and a range: which kernels a compiler fuses is not known before."""
    if value == "off":
        return plan.doubted(0.0, "it is not compiled already")
    words = "how many kernels a compiler fuses is not known before: only a range"
    if not plan.today.on_gpu:
        return _compiled_on_cpu(plan)
    account = plan.today.facts.breakdown
    low = _played_ratio(plan, plan.today.work.of("pointwise", "normalization", "reduction"), FUSED_AWAY)
    launching = account.typical_share("launch") if account is not None else 0.0
    return _ranged(plan, max(0.1, low - launching), SLOWER, words)


def channels_last(plan: Plan, value: str, known: Known) -> Plan:
    """The memory layout in which convolutions need no change of layout."""
    if not is_on(value):
        raise Refused("what another memory layout would cost is not foretold")
    timeline = plan.today.run.timeline
    if timeline is None or not spans.named(timeline, lambda n: _CONVOLUTION.search(n) is not None).any():
        raise Refused("no convolution was seen in the trace")
    if not plan.today.on_gpu:
        return _layout_on_cpu(plan, timeline)
    low = _played_ratio(plan, plan.today.work.of("layout"), 0.0) * GPU_LAYOUT_GAIN
    return _ranged(plan, low, SLOWER, "changes of layout fall away, and convolutions may become faster: only a range")


def _compiled_on_cpu(plan: Plan) -> Plan:
    today = plan.today
    timeline = today.run.timeline
    if timeline is None or today.facts.breakdown is None:
        raise Refused("no trace shows which operations a compiler could change")
    updating = today.facts.optimizer_us
    kept = _share(today, spans.named(timeline, lambda n: _PRODUCT.match(n) is not None))
    kept += (today.wait_us + (updating.median if updating is not None else 0.0)) / today.step.median
    kept = min(1.0, kept)
    low = max(kept, CPU_FUSED_AWAY) / CPU_ROUGHLY
    checks = CPU_CHECKS_US / today.step.median
    why = (
        f"a compiler may save all but {percent(kept)} of a step, and its checks before each call, up to "
        f"{duration(CPU_CHECKS_US)}, may take longer"
    )
    words = (
        f"matrix products, the optimizer and waiting for data, {percent(kept)} of a step, stay what they are; how much "
        "faster the rest becomes is not known before: only a range"
    )
    return _ranged(plan, *_telling(low, CPU_ROUGHLY + checks, why), words)


def _layout_on_cpu(plan: Plan, timeline: Timeline) -> Plan:
    if plan.today.facts.breakdown is None:
        raise Refused("no trace shows how long convolutions take")
    share = _share(plan.today, spans.named(timeline, lambda n: _IMAGE.search(n) is not None))
    low, high = (1 + share * (by - 1) for by in CPU_LAYOUT)
    why = (
        f"convolutions and pooling take {percent(share)} of a step, and by their sizes this layout makes them faster "
        "or slower on a CPU"
    )
    words = f"this layout changes only convolutions and pooling, {percent(share)} of a step: only a range"
    return _ranged(plan, *_telling(low / CPU_ROUGHLY, high * CPU_ROUGHLY, why), words)


def _share(today: Today, mask: spans.Mask) -> float:
    """Of the profiled steps that these rows cover on the training threads."""
    account = today.facts.breakdown
    assert account is not None
    return min(1.0, training_spans_us(today, mask) / account.mean_step_us) if account.mean_step_us else 0.0


def _telling(low: float, high: float, why: str) -> tuple[float, float]:
    """The range. Raises Refused where it says neither that something is gained nor that little changes."""
    if low < 1 / TELLS and high > TELLS:
        raise Refused(why)
    return low, high


def _ranged(plan: Plan, low: float, high: float, words: str) -> Plan:
    middle = float(np.sqrt(low * high))
    ranged = replace(plan, pure_factor=plan.pure_factor * middle, only_sign=True)
    return ranged.doubted(0.0, words).reached(low / middle, high / middle)


def _played_ratio(plan: Plan, chosen: np.ndarray, remains: float) -> float:
    """Of the window in which that share of the chosen rows of the device's work remains."""
    work, replay = plan.today.work, plan.today.replay
    assert replay is not None
    factor = np.ones(len(work.timeline))
    factor[work.rows[chosen]] = remains
    return float(np.median(replay.play(Changes(device_factor=factor)).step_ns)) / 1e3 / plan.today.played_us
