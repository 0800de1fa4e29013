"""Readings of the processor for made-up runs: so much of each second a thread computed, waited, and others had."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from gpulab.run import CoreTimes, CoreUse, Run


def with_cores(
    run: Run,
    *,
    computed: float = 1.0,
    waited: float | None = 0.0,
    got: float = 1.0,
    others: float | None = 0.0,
    pool_waiting: float = 0.0,
    workers_waiting: float = 0.0,
    throttled: float | None = None,
    cores: int = 2,
    quota: float | None = None,
) -> Run:
    """The run with even readings from its begin to its end. None: the system does not tell."""
    t_ns = np.linspace(0, run.wall_ns, 50).astype(np.int64)
    unknown = np.full(len(t_ns), -1, np.int64)

    def grows(rate: float | None) -> np.ndarray:
        return unknown.copy() if rate is None else (t_ns * rate).astype(np.int64)

    environment = replace(
        run.environment, affinity_cores=cores, core_quota=quota, usable_cores=min(cores, quota or cores)
    )
    times = CoreTimes(t_ns, grows(computed), grows(waited), grows(got), np.zeros(len(t_ns), np.uint8))
    use = CoreUse(
        t_ns=t_ns.copy(),
        tree_cpu_ns=grows(got),
        others_cpu_ns=grows(others),
        stolen_ns=grows(0.0),
        pool_wait_ns=grows(pool_waiting),
        workers_wait_ns=grows(workers_waiting),
        pressure_ns=unknown,
        quota_periods=unknown if throttled is None else t_ns // 100,
        throttled_periods=unknown if throttled is None else (t_ns // 100 * throttled).astype(np.int64),
    )
    return replace(run, environment=environment, core_times=times, core_use=use)
