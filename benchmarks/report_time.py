"""From the cell's end to its report shown, for a window of about 100,000 events, against `prof.key_averages()`."""

from __future__ import annotations

import os
import tempfile
import time

from benchmarks.harness import ratio_with_interval

REPEATS = 5
OPERATORS_PER_STEP = 4_000  # about five events each


def measure() -> dict[str, object]:
    """Seconds per part and in sum, and the ratio to `key_averages` on the same recording."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULAB_DIR"] = folder
        rows = [_once() for _ in range(REPEATS)]
    middle = {key: sorted(r[key] for r in rows)[REPEATS // 2] for key in rows[0]}
    peer = ratio_with_interval([r["key_averages_s"] / r["cell_end_to_report_s"] for r in rows])
    return {"median": middle, "key_averages_over_gpulab": peer}


def _once() -> dict[str, float]:
    import torch

    import gpulab

    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    session = gpulab.profile("report time", show=False, steps=16, trace_steps=5)
    x = torch.ones(4)
    session.start()
    from gpulab.capture.steps.loop import StopRun

    try:
        while True:
            for _ in range(OPERATORS_PER_STEP):
                x.add_(1)
            optimizer.step()
    except StopRun as end:
        began = time.perf_counter()
        session.__exit__(StopRun, end, None)
    captured = time.perf_counter()
    session.report.bundle(), session.report.fragment()
    shown = time.perf_counter()
    profile = session._capture._phases.recording.profile  # type: ignore[union-attr]
    profile.key_averages()
    return {
        "events": float(session.run.observer.event_count),
        "capture_and_save_s": captured - began,
        "report_s": shown - captured,
        "cell_end_to_report_s": shown - began,
        "key_averages_s": time.perf_counter() - shown,
        "profiler_stop_s": (session.run.observer.profiler_stop_ns or 0) / 1e9,
    }
