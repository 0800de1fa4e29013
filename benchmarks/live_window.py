"""A live window of about 600,000 events: from the stopped profiler to finished accounting, against `key_averages()`."""

from __future__ import annotations

import time

from msgspec.structs import replace

from benchmarks.harness import ratio_with_interval

OPERATORS = 120_000  # about five events each
REPEATS = 3


def measure() -> dict[str, object]:
    """Seconds of both on the same recording, and their ratio."""
    import torch

    torch.set_num_threads(1)
    rows = [_once() for _ in range(REPEATS)]
    middle = {key: sorted(r[key] for r in rows)[REPEATS // 2] for key in rows[0]}
    ratio = ratio_with_interval([r["key_averages_s"] / r["accounting_s"] for r in rows])
    return {"median": middle, "key_averages_over_gpulab": ratio}


def _once() -> dict[str, float]:

    import torch

    import gpulab
    from gpulab.analysis.facts import facts
    from gpulab.capture.steps.profiler_window import Window

    with gpulab.profile("frame of a run", show=False, save=False, trace=False) as frame:
        gpulab.step()
    window, x = Window("cpu"), torch.ones(4)
    origin_ns = time.perf_counter_ns()
    window.start()
    for step in range(4):
        window.step_begins(step + 1)
        for _ in range(OPERATORS // 4):
            x.add_(1)
    recording = window.stop()
    began = time.perf_counter()
    timeline = recording.timeline(origin_ns)
    facts(replace(frame.run, timeline=timeline, traced_numbers=()))
    accounted = time.perf_counter()
    recording.profile.key_averages()
    return {
        "events": float(len(timeline)),
        "accounting_s": accounted - began,
        "key_averages_s": time.perf_counter() - accounted,
    }
