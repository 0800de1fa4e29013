"""Rule about what a loop does once the parameters are updated: metrics of every step, logs, plots."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.after_update import after_update
from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS
from gpulab.analysis.places import line_of
from gpulab.diagnosis.case import Case
from gpulab.diagnosis.finding import Evidence, Finding
from gpulab.diagnosis.headline import ms, percent
from gpulab.intervals import Intervals, intersect, joined, paint, subtract

_WAITS = ("data_wait", "sync_wait")
_CURE = (
    "Do it every hundredth step, or on the whole at once: one call on the list of all tensors (torch._foreach_norm, "
    "torch.stack) and one .tolist() in place of many .item()."
)


def following_update(case: Case) -> Finding | None:
    """After each update of the parameters a part of the step goes to something that does not train."""
    account, optimizer = case.facts.breakdown, case.facts.optimizer
    if account is None or optimizer is None or not case.step_us or case.withheld("idle_causes") is not None:
        return None
    times = after_update(case.facts.run, account, optimizer)
    share = _share(case, times)
    if share < case.thresholds.idle_notice:
        return None
    line = line_of(case.facts.run, times)
    return Finding(
        "logging_or_eval",
        f"{percent(share)} of {case.unit} goes to what the loop does after it has updated the parameters: metrics, "
        "logs or copies, which train nothing.",
        (
            Evidence(
                f"{ms(share * case.step_us)} of {ms(case.step_us)} lie between the optimizer's step and the next batch",
                (int(times[0, 0]), int(times[0, 1])),
            ),
        ),
        share * case.step_us,
        "measured",
        parts=tuple(p for p in PARTS if p not in _WAITS and not (case.on_gpu and p in DEVICE_PARTS)),
        cure=_CURE,
        source_line="" if line is None else str(line),
        gone=tuple((start, end) for start, end in times.tolist()),
    )


def _share(case: Case, times: Intervals) -> float:
    """Of a profiled step; on a GPU what of it leaves the GPU idle without waiting for it."""
    account, work = case.facts.breakdown, case.facts.work
    if account is None or not len(times):
        return 0.0
    if case.on_gpu:
        if work is None:
            return 0.0
        waits = joined(*(b.times for b in case.facts.blocking))
        times = subtract(intersect(times, work.idle), waits)
    windows = np.array([(s.start_ns, s.end_ns) for s in account.steps], dtype=np.int64)
    shares = paint(windows, [times])[:, 0] / np.maximum(1, windows[:, 1] - windows[:, 0])
    return float(np.median(shares))


__all__ = ["following_update"]
