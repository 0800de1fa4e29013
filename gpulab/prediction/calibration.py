"""Every figure on which the formulas rest: measured, published, or ours, with its unit and where it comes from.

"Here" is two cores of a shared x86-64 server, 2026, with PyTorch's build for the CPU. "Ours" is a judgement that no
measurement carries yet. A deviation (`_SD`) is that of the ratio's logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from gpulab.formatting import plural, signed_percent
from gpulab.prediction.prediction import Prediction

# -- how data come -----------------------------------------------------------------------------------------------------

# µs from a worker's batch to the loop's having it, where the run does not tell: definitions.md, "Feeding".
HAND_OFF_US = 2_000.0
# µs of the loop's processor to have a batch: of the batch, and of each of its tensors. Here, 1 to 10 tensors a batch.
RECEIVING_US = (500.0, 650.0)
# Tensors of a batch, where their number is not known. Ours.
TENSORS = 2
# Times `HAND_OFF_US`: a loop that waits longer than this for its workers waits for their making. Ours.
WAITS = 1.25
# Times what handing a batch over took where it was measured, least and most. Ours.
HANDING = (0.7, 1.3)
# The same where only the figures of another machine tell: `RECEIVING_US`. Ours.
HANDING_ELSEWHERE = (0.4, 2.5)
# Share of a batch's time in which no core was free: from there on what took the cores may take them again. Ours.
CROWDED = 0.1
# Share of a step: data that are waited for less long can hardly be gained or told. Ours.
SMALL_WAIT = 0.03
# Of max(computing, loading): it leaves out how the two hinder each other. Ours.
WORKERS_SD = 0.05
CACHE_SD = 0.04  # ours

# -- workers that start anew -------------------------------------------------------------------------------------------

# µs to start and end workers, in all and for each. With an empty dataset: 67 and 39 ms for one, 95 and 46 for two,
# 154 and 76 for four, on two machines of two cores each, 2026; these lie between the two.
BASE_US, EACH_US = 28_000.0, 16_000.0
# µs where a worker is a new Python that imports torch. Ours, for two cores.
SPAWNED_US = 2_000_000.0
# Times that estimate, least and most: machines differ. Ours, from the two machines.
STARTING = (0.5, 2.0)
# Steps: in shorter epochs the short runs of a comparison hold the start of one. Ours.
SHORT_EPOCH = 32
# Of what is left: the processes' exit may go on beside the training. Ours.
RESTART_SD = 0.04

# -- another batch size ------------------------------------------------------------------------------------------------

FIT_SD = 0.03  # of a short run's median step; ours
# More time, for each doubling past the sizes that were run, beside what the slope leaves open: caches. Ours.
BEYOND_SD = 0.05
# Times the time of the line: further off nothing is said with one more figure. Ours.
MOST_OFF = 20.0
# Highest over lowest: the middle of a wider range is no estimate. Ours.
ONLY_A_RANGE = 3.0
# Share of a step that goes to calls: with less what computes decides, and how it grows is not seen. Ours.
MOSTLY_CALLS = 0.5

# -- the optimizer -----------------------------------------------------------------------------------------------------

# Bytes of each parameter that an update moves which PyTorch cannot fuse: about four operators. Ours.
OTHER_BYTES = 40
# Shares of the host's time in an update of many launches that one fused call, and one sum of gradients, leave. Ours.
FUSED_HOST, ASIDE_HOST = 0.2, 0.1
# µs of an update's own Python, and of gathering each tensor. Measured: 40 to 100, and 1 to 3.
PYTHON_US, PER_TENSOR_US = 60.0, 1.5
# µs to begin one operator on a CPU under the profiler, at most. Here: 2 to 4.
BEGIN_US = 4.0
# Times the fused step on a CPU, least and most: how far off its estimate may be. Ours.
FUSED_DOUBT = (0.6, 1.6)
FUSED_SD, ACCUMULATE_SD = 0.06, 0.03  # ours

# -- other kernels and number formats ----------------------------------------------------------------------------------

# Times a step on a GPU that compiling may make it: definitions.md, "Anchors", an 8B model 0.94× as fast.
COMPILED_SLOWER = 1.07
# Share of the time of kernels that only move data that remains where they are fused. Ours.
FUSED_AWAY = 0.3
# Of a matrix product in 16 bits at least: it reads and writes half the bytes, whatever its units do.
LEAST_GAIN = 2.0
PRECISION_SD = 0.08  # ours

# -- leaving something out ---------------------------------------------------------------------------------------------

# Times the pause, and at most times what a CPU has to do beside it: that falls away too, for the pause had emptied its
# caches. Least, likely and most. On planted cells of two machines, 2026: 0 to 0.45, median 0.08 and 0.17.
COLD = (0.0, 0.1, 0.45)
# Of the time in pauses, over the root of their number: how far a short run may be off. Ours.
FEW = 0.5
# Of the time in pauses: what they cost beside it (a thread that goes on). Ours.
GONE_SD = 0.05
REPLAY_SD = 0.03  # of a window played without some waits; ours

# -- the step itself, and playing it again -----------------------------------------------------------------------------

# Steps: what disturbs a machine lasts longer than one, so that more of them tell hardly more. Ours.
INDEPENDENT = 10
# Busy, and of the step left without the GPU's work: from there on the trace does not show the wait for it. Ours.
HIDDEN = 0.9
# Tasks that are played, over and over: a tenth of a second here.
MOST_TASKS = 20_000
# ns: a wait that ends so soon after a task of the device was a wait for it, and the same of a call that says so. Ours.
TIGHT_NS, NEAR_NS = 20_000, 100_000
# Launches that a GPU's queue holds: on a V100 (v100_ddp_healthy) 1022 were waiting at each launch that was held up.
QUEUE_HOLDS = 1_000
# ns of a synchronizing call that has nothing to wait for, and between two kernels of one stream. Ours.
LEAST_SYNC_NS, LEAST_GAP_NS = 2_000, 500
# Percentile of the latencies of launches onto an idle stream that stands for the least one. Ours.
LATENCY_PERCENTILE = 5


# Predictions in the light of those that came before: intervals as wide as the errors on this machine were.


PRIOR = 10.0  # records
LEAST_FOR_BIAS = 10
NARROWEST, WIDEST = 1 / 3, 10.0  # times the formula's own half-width


def recalibrated(prediction: Prediction, errors: Sequence[float]) -> Prediction:
    """The same with its interval widened or narrowed. `errors`: measured over predicted ratio, each above 0.

    Unchanged where nothing is predicted, only a range is, or there is no record.
    """
    usable = np.array([e for e in errors if e > 0 and math.isfinite(e)], dtype=np.float64)
    if prediction.ratio is None or prediction.interval is None or prediction.only_sign or not len(usable):
        return prediction
    logs = np.log(usable)
    bias = _bias(logs)
    below, above = (abs(math.log(edge / prediction.ratio)) for edge in prediction.interval)
    half = max((below + above) / 2, 1e-6)
    scale = _scale(np.abs(logs - bias), half)
    ratio = prediction.ratio * math.exp(bias)
    interval = (ratio * math.exp(-below * scale), ratio * math.exp(above * scale))
    count = plural(len(usable), "earlier prediction")
    words = f"range from the formula and {count} measured on this machine"
    moved = f"; corrected by {signed_percent(math.expm1(bias))}, their median error" if bias else ""
    return replace(prediction, ratio=ratio, interval=interval, basis=f"{prediction.basis}; {words}{moved}")


def _scale(sizes: np.ndarray, half: float) -> float:
    seen = float(np.max(sizes) if len(sizes) < 20 else np.percentile(sizes, 95))
    scale = (PRIOR + len(sizes) * seen / half) / (PRIOR + len(sizes))
    return min(max(scale, NARROWEST), WIDEST)


def _bias(logs: np.ndarray) -> float:
    """The median error where there are enough and it is beyond twice its own doubt; else 0."""
    if len(logs) < LEAST_FOR_BIAS:
        return 0.0
    middle = float(np.median(logs))
    deviation = 1.4826 * float(np.median(np.abs(logs - middle)))
    return middle if abs(middle) > 2 * 1.253 * deviation / math.sqrt(len(logs)) else 0.0
