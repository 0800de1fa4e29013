"""How far a GPU's clock was held down."""

from __future__ import annotations

import numpy as np

from gpulab.run import THROTTLE_NAMES, Run


def slowed_fraction(run: Run) -> float | None:
    """How far the clock was below its highest reading while limits held it (mean); None where it was not read."""
    clock, reasons = run.samples.get("sm_clock_mhz"), run.samples.get("throttle_reasons")
    if clock is None or reasons is None or not len(reasons.value) or not len(clock.value) or clock.value.max() <= 0:
        return None
    bits = reasons.value.astype(np.int64)
    after = np.searchsorted(reasons.t_ns, clock.t_ns, side="right") - 1
    held = (bits[np.maximum(after, 0)] & sum(THROTTLE_NAMES)) != 0
    return float(1 - clock.value[held].mean() / clock.value.max()) if held.any() else None
