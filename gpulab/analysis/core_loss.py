"""How long a step goes without a core of the CPU, and in which of its parts."""

from __future__ import annotations

from msgspec import Struct

from gpulab.analysis.facts import Facts
from gpulab.analysis.step_shares import core_wait_within_data_wait


class CoreLoss(Struct, frozen=True):
    """µs per step that go to waiting for a core: in the training thread, in its compute threads, in loading for it."""

    thread_us: float
    pool_us: float
    loading_us: float

    @property
    def total_us(self) -> float:
        return self.thread_us + self.pool_us + self.loading_us


def core_loss_of(facts: Facts, step_us: float | None, least_pool_share: float) -> CoreLoss | None:
    """None where the system does not tell, or there is no step. Waiting of compute threads for less than
    `least_pool_share` of the step counts as none.

    On a GPU only what its work does not hide. While the training thread waits for its other compute threads it sleeps
    or spins: at most all that it does not wait for a core itself.
    """
    cores = facts.cores
    if cores is None or cores.thread_wait_fraction is None or not step_us:
        return None
    on_gpu = facts.run.device.kind == "cuda"
    shares, unknown = facts.shares, 0.0 if on_gpu else cores.thread_wait_fraction
    thread_us = (unknown if shares is None else shares.of("core_wait")) * step_us
    loading_us = core_wait_within_data_wait(facts) * step_us
    if on_gpu:
        return CoreLoss(thread_us, 0.0, loading_us)
    threads = facts.run.environment.compute_threads or 1
    each = min(1.0, (cores.pool_waiting or 0.0) / (threads - 1)) if threads > 1 else 0.0
    pool_us = 0.0 if shares is None else each * shares.of("compute", "optimizer", "launch") * step_us
    return CoreLoss(thread_us, pool_us if pool_us >= least_pool_share * step_us else 0.0, loading_us)
