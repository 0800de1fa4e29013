"""Predictions for settings of the computing: number formats, attention, a compiled model, the optimizer.

Number formats by Amdahl over the classes of kernels: matrix products gain the ratio of the peaks, at most. Kernels that
move data gain half, because they move half the bytes; operators that autocast keeps in fp32 and the optimizer gain
nothing. The window is replayed with these times: a step that waits for its launches gains nothing (definitions.md,
"Mixed precision").

`analysis.optimizer_work` says how many bytes an update of the optimizer moves, fused and not. The cost of moving them
is read from its own operators. On a CPU, `aten::mul_` in place reads and writes 8 bytes of each parameter: a fused Adam
moves 28, so it takes 3.5 times as long as one `mul_` over all parameters, minus the cost to begin each of those
operators, because a fused step begins once. On a GPU, the time of the update's work scales with the bytes it moves.
"""

from __future__ import annotations

import re

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.device_peaks import Peaks, peaks_of
from gpulab.analysis.optimizer_work import ADD, SCALE, OptimizerWork, bytes_of
from gpulab.formatting import duration, factor, percent
from gpulab.intervals import covers
from gpulab.prediction.prediction import PriorEvidence
from gpulab.prediction.replay import Changes
from gpulab.prediction.step import Baseline, NoPrediction, Projection, at_least, is_on, training_spans_us
from gpulab.run import Float64, Int64
from gpulab.timeline.kernel_names import reading
from gpulab.timeline.labels import OPERATORS, labels

# Bytes per parameter moved by an update that PyTorch cannot fuse: about four operators. Ours.
OTHER_BYTES = 40
# Of the host's time in an update of many launches: the shares that one fused call, and one sum of gradients, take.
# Ours.
FUSED_HOST, ASIDE_HOST = 0.2, 0.1
# µs of an update's own Python, and to gather each tensor. Measured: 40 to 100, and 1 to 3.
PYTHON_US, PER_TENSOR_US = 60.0, 1.5
# µs to begin one operator on a CPU under the profiler, at most. Here: 2 to 4.
BEGIN_US = 4.0
# Lowest and highest factor on the estimated fused step on a CPU. Ours.
FUSED_DOUBT = (0.6, 1.6)
FUSED_SD, ACCUMULATE_SD = 0.06, 0.03  # ours
# Highest factor of compilation on a step on a GPU: definitions.md, "Anchors", an 8B model 0.94× as fast.
COMPILED_SLOWER = 1.07
# Share of the time of kernels that only move data that remains after fusion. Ours.
FUSED_AWAY = 0.3
# Least speedup of a matrix product in 16 bits: it reads and writes half the bytes, whatever units compute it.
LEAST_GAIN = 2.0
PRECISION_SD = 0.08  # ours

_MATH_ATTENTION = "aten::_scaled_dot_product_attention_math"


def attention(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Flash or memory-efficient attention does not write the attention matrix, saving kernels that only move it."""
    timeline = projection.today.run.timeline
    plain = None if timeline is None else labels(timeline).named(_MATH_ATTENTION.__eq__)
    if timeline is None or plain is None or not plain.any():
        raise NoPrediction("the trace has no math attention")
    if value == "math":
        return projection.as_it_is("it is already math attention")
    if not projection.today.on_gpu:
        share = min(0.9, training_spans_us(projection.today, plain) / projection.today.step.median)
        words = "math attention takes part of a step; fused attention writes no large matrices and takes less"
        return _ranged(projection, 1 - share, 1.02, words)
    work = projection.today.work
    launched = work.call >= 0
    inside = np.zeros(len(work.rows), dtype=bool)
    inside[launched] = covers(labels(timeline).times(plain), timeline.start_ns[work.call[launched]])
    backward = np.array(["softmax" in n.lower() and "backward" in n.lower() for n in work.names_of(work.rows)], bool)
    low = _played_ratio(projection, (inside & ~work.of("matrix")) | backward, 0.0)
    return _ranged(projection, low, 1.0, "kernels that only write and read the attention matrix are saved")


def compiled(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Only a range: which kernels the compiler fuses is not known in advance."""
    if value == "off":
        return projection.as_it_is("the model is not compiled")
    if not projection.today.on_gpu:
        raise NoPrediction("try it: only a run shows what torch.compile saves on a CPU, and what its guards cost")
    words = "the number of kernels that torch.compile fuses is not known in advance: only a range"
    account = projection.today.facts.breakdown
    low = _played_ratio(projection, projection.today.work.of("pointwise", "normalization", "reduction"), FUSED_AWAY)
    launching = account.typical_share("launch") if account is not None else 0.0
    return _ranged(projection, max(0.1, low - launching), COMPILED_SLOWER, words)


def _ranged(projection: Projection, low: float, high: float, words: str) -> Projection:
    return projection.scaled(float(np.sqrt(low * high)), low, high, 0.0, words)


def _played_ratio(projection: Projection, mask: np.ndarray, remains: float) -> float:
    """The ratio of the replayed window to the measured one if the device work in `mask` takes `remains` of its time."""
    work = projection.today.work
    factor = np.ones(len(work.timeline))
    factor[work.rows[mask]] = remains
    return projection.today.played_with_us(Changes(device_factor=factor)) / projection.today.played.step_us


MOVED = 0.5  # share of the bytes that remains
_FULL_PRECISION = re.compile(r"softmax|layer_?norm|nll|loss|exp|pow", re.IGNORECASE)  # autocast keeps these in fp32


def amp(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Mixed precision: "bf16" or "fp16"."""
    if not projection.today.on_gpu:
        raise NoPrediction(
            "the speedup of 16 bits on a CPU depends on its instruction set, for which there is no formula"
        )
    if value not in ("bf16", "fp16"):
        raise NoPrediction("the cost of turning mixed precision off is not predicted")
    peaks = _peaks(projection)
    fast = peaks.fp16_tflops if value == "fp16" else peaks.bf16_tflops
    if fast is None:
        raise NoPrediction(f"{projection.today.run.device.name} has no {value} units; its 16-bit format is fp16")
    full, gain = fast / peaks.fp32_tflops, fast / (peaks.tf32_tflops or peaks.fp32_tflops)
    fp32, tf32, moved = _classes(projection)
    best, least = np.ones(len(moved)), np.ones(len(moved))
    for rows, of_peaks in ((fp32, full), (tf32, gain)):
        best[rows], least[rows] = 1 / of_peaks, 1 / min(LEAST_GAIN, of_peaks)
    best[moved], least[moved] = MOVED, (1 + MOVED) / 2
    words = f"fp32 matmuls: speedup up to {factor(full)}×; memory-bound kernels: up to 2×"
    return _between(projection, best, least, words)


def tf32(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """fp32 matrix products on the tensor cores, with fewer digits."""
    if not projection.today.on_gpu:
        raise NoPrediction("TF32 is a number format of NVIDIA's GPUs")
    if not is_on(value):
        raise NoPrediction("the cost of turning TF32 off is not predicted")
    peaks = _peaks(projection)
    if peaks.tf32_tflops is None or "AMD" in projection.today.run.device.name:
        raise NoPrediction(f"{projection.today.run.device.name} has no TF32 units that PyTorch can switch")
    gain = peaks.tf32_tflops / peaks.fp32_tflops
    fp32, _, _ = _classes(projection)
    words = f"fp32 matmuls: speedup up to {factor(gain)}×"
    return _between(projection, np.where(fp32, 1 / gain, 1.0), np.where(fp32, 1 / np.sqrt(gain), 1.0), words)


def _between(projection: Projection, best: Float64, least: Float64, words: str) -> Projection:
    """The likely gain is the geometric mean of `best` and `least`; the interval spans both."""
    work, gains = projection.today.work, []
    for of_rows in (best, np.sqrt(best * least), least):
        factor = np.ones(len(work.timeline))
        factor[work.rows] = of_rows
        gains.append(Changes(device_factor=factor))
    best_us, likely_us, least_us = map(projection.today.played_with_us, gains)
    changed = replace(projection, changes=projection.changes.and_also(gains[1]))
    return changed.doubted(PRECISION_SD, words).reached(min(1.0, best_us / likely_us), max(1.0, least_us / likely_us))


def _peaks(projection: Projection) -> Peaks:
    name = projection.today.run.device.name
    peaks = peaks_of(name)
    if peaks is None:
        raise NoPrediction(f"the peaks of {name} per number format are not known")
    return peaks


def _classes(projection: Projection) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which rows of the device's work are fp32 matrix products, TF32 matrix products, and kernels that move data.

    The name of a kernel shows whether its data already has 16 bits.
    """
    work = projection.today.work
    names = work.names_of(work.rows)
    formats = {name: reading(str(name)).numbers for name in set(names.tolist())}
    of = np.array([formats[name] for name in names.tolist()], dtype=object)
    matrix = work.of("matrix", "attention")
    in_full = np.array([_FULL_PRECISION.search(str(name)) is not None for name in names.tolist()], dtype=bool)
    narrow = of == "narrow"
    moved = work.of("pointwise", "normalization", "reduction", "layout") & ~in_full & ~narrow
    return matrix & (of == "fp32"), matrix & (of == "tf32"), moved


ASIDE_BYTES = bytes_of(ADD)  # the knob's own sum of gradients


class Inside(Struct, frozen=True):
    """An optimizer's step, per step of training; `time_us` comes from the unprofiled steps.

    `pass_us` is one operator's pass over all parameters on a CPU, None if the trace has no such operator; `pass_bytes`
    is what it moves per parameter.
    """

    work: OptimizerWork
    time_us: float
    pass_us: float | None
    pass_bytes: int
    tensors: float


def _inside(today: Baseline) -> Inside:
    """The optimizer's step of the run. Raises NoPrediction if the trace shows no optimizer."""
    timeline, account, time = today.run.timeline, today.facts.breakdown, today.facts.optimizer_us
    work = today.facts.optimizer
    if timeline is None or account is None or time is None or work is None or not len(work.step_times):
        raise NoPrediction("the trace has no optimizer step")
    plain = work.name == "SGD" and not work.has_momentum
    name = "aten::add_" if plain else "aten::mul_"
    once = 2 if work.name == "AdamW" else 1  # AdamW: decay and mean of squares; others: one
    windows = account.host_windows
    spans = labels(timeline)
    rows = np.flatnonzero(spans.of(*OPERATORS) & spans.named(name.__eq__))
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
    """The time of a step's operators, each at its median over the steps, to ignore interruptions.

    The cheapest operator shows the cost to begin an operator, which is subtracted from each. They run in the same order
    in each step; if their number differs between steps, the median operator is used for all.
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
        raise NoPrediction("a fused optimizer does not show what an unfused one takes")
    moved = inside.work.update_bytes
    if moved is None:
        raise NoPrediction(f"the bytes that a fused {name} moves are not known")
    share = moved.fused_fraction
    if projection.today.on_gpu:
        changes = _scaled(projection.today, inside, device=share, host=FUSED_HOST)
        words = f"a fused {name} moves {percent(share)} of the bytes, with few launches"
        return replace(projection, changes=projection.changes.and_also(changes)).doubted(FUSED_SD, words)
    if inside.pass_us is None:
        raise NoPrediction(f"the operators of {name} do not show the time of one pass over its parameters")
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
    """The optimizer steps once per k batches; the other batches only add their gradients."""
    rounds = at_least(1, value)
    if rounds == 1:
        return projection.as_it_is("each batch is already a step")
    inside = _inside(projection.today)
    share_saved = 1 - 1 / rounds
    aside = ASIDE_BYTES / _moved_bytes(inside.work)
    words = f"the optimizer ({duration(inside.time_us)} of a step) runs once per {rounds} batches"
    if projection.today.on_gpu:
        changes = _scaled(projection.today, inside, device=1 / rounds + aside, host=1 / rounds + ASIDE_HOST)
        return replace(projection, changes=projection.changes.and_also(changes)).doubted(ACCUMULATE_SD, words)
    put_us = ASIDE_BYTES / inside.pass_bytes * inside.pass_us if inside.pass_us is not None else aside * inside.time_us
    put_us += _overhead_us(inside)
    saved = share_saved * inside.time_us - put_us
    return replace(projection, saved_us=projection.saved_us + saved).doubted(ACCUMULATE_SD, words)


def _overhead_us(inside: Inside) -> float:
    """The fixed cost on a CPU of one call for all parameters, independent of their size."""
    return PYTHON_US + PER_TENSOR_US * inside.tensors


def _moved_bytes(work: OptimizerWork) -> int:
    """Bytes per parameter that the current update moves."""
    if work.update_bytes is None:
        return OTHER_BYTES
    return work.update_bytes.fused_bytes if work.style == "fused" else work.update_bytes.unfused_bytes


def _scaled(today: Baseline, inside: Inside, *, device: float, host: float) -> Changes:
    """Changes that scale the optimizer's device work to `device`, and the host's time in it to `host`, as shares."""
    work, update_times = today.work, inside.work.step_times
    launched = work.call >= 0
    theirs = work.rows[launched][covers(update_times, work.timeline.start_ns[work.call[launched]])]
    factor = np.ones(len(work.timeline))
    factor[theirs] = min(1.0, device)
    return Changes(device_factor=factor, host=((update_times, min(1.0, host)),))
