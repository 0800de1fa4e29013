"""How much more several ranks do than one: the throughput of a training by the number of its ranks. Pure.

Each rank has the same batch whatever their number (weak scaling, Gustafson 1988): the work of a step grows with the
ranks, so the efficiency is the step of the fewest ranks over the step of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from gpulab.tuning.compare.statistics import paired


class ScalingPoint(Struct, frozen=True):
    """One number of ranks. `efficiency` is 1 where each rank does as much in a second as each of the fewest ranks.

    `interval` is its 95 % interval, None with fewer than two rounds, and of the fewest ranks.
    `speedup`: the work done in a second, over that of the fewest ranks.
    """

    ranks: int
    step_us: float  # median over the rounds
    efficiency: float
    interval: tuple[float, float] | None
    speedup: float


def scaling(step_us: Mapping[int, Sequence[float]]) -> tuple[ScalingPoint, ...]:
    """From the step of the slowest rank in each round, by the number of ranks, in order; each ran once in a round."""
    counts = sorted(step_us)
    if not counts:
        return ()
    fewest = np.asarray(step_us[counts[0]], dtype=np.float64)
    points = []
    for count in counts:
        times = np.asarray(step_us[count], dtype=np.float64)
        rounds = min(len(times), len(fewest))
        estimate = paired(times[:rounds] / fewest[:rounds])
        if estimate is None:
            continue
        spread = None if count == counts[0] else estimate.interval  # the fewest are what all are compared with
        interval = None if spread is None else (1 / spread[1], 1 / spread[0])
        efficiency = 1 / estimate.ratio
        speedup = efficiency * count / counts[0]
        points.append(ScalingPoint(count, float(np.median(times)), efficiency, interval, speedup))
    return tuple(points)
