"""Another batch size: T(B) = max(h, a + b·B) and M(B) = m0 + m1·B from short runs; of one run alone only a range.

Where a CPU computes and most of a step is the calls of its operators, one run tells a, too: calls cost the same for
any batch, and so does the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.formatting import duration, percent
from gpulab.prediction.baseline import Baseline, Refused, at_least
from gpulab.prediction.calibration import BEYOND_SD, FIT_SD, HAND_OFF_US, MOST_OFF, MOSTLY_CALLS, ONLY_A_RANGE, WAITS
from gpulab.prediction.prediction import PriorEvidence
from gpulab.prediction.step import Z_975, Projection


class Line(Struct, frozen=True):
    """a + b·B, but at least `floor`: below it the host's own time decides, not the batch."""

    a: float
    b: float
    floor: float

    def at(self, size: float) -> float:
        """The predicted time of a step at this batch size, in the unit of `a`."""
        return max(self.floor, self.a + self.b * size)


def fitted(times: Mapping[int, float]) -> Line:
    """Through at least two sizes. A smallest size that lies above the others' line is on the floor.

    Relative errors are minimized: a small batch counts as much as a large one. A step never shrinks with its batch.
    """
    sizes = sorted(times)
    line = _through({size: times[size] for size in sizes})
    if len(sizes) > 2:
        upper = _through({size: times[size] for size in sizes[1:]})
        smallest = times[sizes[0]]
        if smallest > 1.05 * (upper.a + upper.b * sizes[0]) and upper.b > 0:
            return Line(upper.a, upper.b, min(smallest, times[sizes[1]]))
    return line


def _through(times: Mapping[int, float]) -> Line:
    size = np.array(list(times), np.float64)
    time = np.array(list(times.values()), np.float64)
    weights = 1 / time
    b, a = np.polyfit(size, time, 1, w=weights)
    if b < 0:
        return Line(float(np.average(time, weights=weights)), 0.0, 0.0)
    if a < 0:
        return Line(0.0, float((time / size).mean()), 0.0)
    return Line(float(a), float(b), 0.0)


def batch_size(projection: Projection, value: str, evidence: PriorEvidence) -> Projection:
    """Samples of a step; the ratio is of the time per sample."""
    size, before = at_least(1, value), size_before(projection, evidence)
    if size == before:
        return projection.as_it_is("the batch size is already that")
    scale = size / before
    if len(evidence.sizes) < 2:
        return _range(projection, scale)
    times_us = {b: us for b, (us, _) in evidence.sizes.items()}
    line = fitted(times_us)
    runs = ", ".join(f"batch {b} took {duration(us)}" for b, us in sorted(times_us.items()))
    beyond = max(0.0, float(np.log2(size / max(evidence.sizes))), float(np.log2(min(evidence.sizes) / size)))
    words = f"linear fit of step time over batch size in short runs: {runs}"
    changed = replace(
        projection,
        pure_factor=projection.pure_factor * line.at(size) / line.at(before),
        samples=projection.samples * scale,
        memory_ratio=_memory_ratio(evidence, size, before),
    )
    sd = float(np.hypot(FIT_SD, max(abs(np.log(line.at(b) / us)) for b, us in times_us.items())))
    low, high = _slope_range(times_us, line, size, float(np.hypot(sd, projection.today.sampling_sd)))
    high *= float(np.exp(Z_975 * BEYOND_SD * beyond))
    ranged = replace(changed, only_sign=changed.only_sign or high > ONLY_A_RANGE * low)
    return ranged.doubted(sd, words).reached(low, high)


def _slope_range(times_us: Mapping[int, float], line: Line, size: int, sd: float) -> tuple[float, float]:
    """Factors on the line's time at `size`: as far as the slope may be off, where each time is off by `sd`.

    Least squares with weights 1 / time; a step of a larger batch takes no less than the largest that was run, and one
    of a smaller batch no more than the smallest.
    """
    at = line.at(size)
    sizes = np.array(list(times_us), np.float64)
    rows = np.stack((np.ones(len(sizes)), sizes), axis=1) / np.array(list(times_us.values()), np.float64)[:, None]
    covariance = np.linalg.inv(rows.T @ rows) * sd**2
    here = np.array([1.0, float(size)])
    off_us = Z_975 * float(np.sqrt(here @ covariance @ here))
    largest, smallest = max(times_us), min(times_us)
    least_us = min(at, times_us[largest] * float(np.exp(-Z_975 * sd))) if size > largest else 0.0
    most_us = max(at, times_us[smallest] * float(np.exp(Z_975 * sd))) if size < smallest else np.inf
    low_us, high_us = max(at - off_us, least_us, at / MOST_OFF), min(at + off_us, most_us, at * MOST_OFF)
    return min(1.0, low_us / at), max(1.0, high_us / at)


def size_before(projection: Projection, evidence: PriorEvidence) -> int:
    """As the code has it. Raises Refused."""
    loader = projection.today.run.loader
    before = evidence.values_before.get("batch_size", "")
    if before.isdigit() and int(before):
        return int(before)
    if loader is None or not loader.batch_size:
        raise Refused("the current batch size is not known")
    return loader.batch_size


def _memory_ratio(evidence: PriorEvidence, size: int, before: int) -> float | None:
    peaks = {b: float(m) for b, (_, m) in evidence.sizes.items() if m}
    if len(peaks) < 2:
        return None
    line = _through(peaks)
    return line.at(size) / line.at(before)


def _range(projection: Projection, scale: float) -> Projection:
    """Time that goes with the samples stays, the rest is shared by more of them, at best all of it."""
    today = projection.today
    calls = _calls_share(today)
    if calls is not None and calls >= MOSTLY_CALLS:
        return _of_calls(projection, scale, calls)
    loads = today.workers == 0 or today.wait_us > HAND_OFF_US * WAITS * today.batches
    fixed = (today.wait_us if loads else 0.0) / today.step.median
    account = today.facts.breakdown
    idle = 1.0
    if account is not None and account.busy_fraction is not None:
        fixed = max(fixed, 0.0)
        idle = max(0.0, 1 - account.typical_share("compute", "memcpy", "memset", "communication"))
    best = fixed + (1 - fixed) / scale
    worst = 1 - idle * (1 - 1 / scale) if scale < 1 else 1.0
    low, high = min(best, worst), max(best, worst)
    middle = (low + high) / 2
    words = "one run does not show how step time grows with batch size"
    ranged = replace(
        projection,
        pure_factor=projection.pure_factor * middle * scale,
        samples=projection.samples * scale,
        only_sign=True,
    )
    return ranged.doubted(0.02, words).reached(low / middle, high / middle)


def _calls_share(today: Baseline) -> float | None:
    """Of a profiled step on a CPU the calls of operators and the optimizer; None where no trace tells."""
    host, updating = today.facts.host, today.facts.optimizer_us
    if host is None:
        return None
    calls = float(np.clip(host.fixed_share, 0.0, 1.0))
    if updating is None:
        return calls
    work = today.facts.optimizer
    times = work.per_parameter if work is not None else 1.0
    return calls + (1 - calls) * min(1.0, times * updating.median / today.step.median)


def _of_calls(projection: Projection, scale: float, calls: float) -> Projection:
    """Calls are shared by more samples, and of the rest the more grows with them, the more of a step it is."""
    fixed = 1 - (1 - calls) ** 2
    likely, *ends = (f / scale + 1 - f for f in (fixed, 1.0, calls))
    words = f"{percent(calls)} of a step is operator calls and optimizer, which do not grow with the batch"
    shared = replace(
        projection, pure_factor=projection.pure_factor * likely * scale, samples=projection.samples * scale
    )
    return shared.doubted(FIT_SD, words).reached(min(ends) / likely, max(ends) / likely)
