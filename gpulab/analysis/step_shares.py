"""Divides a typical step into its parts; every figure about a part of a step is taken from here.

Source: definitions.md, "The breakdown of a typical step". The length of a step and its waits come from all steps; how
the rest divides comes from the few profiled steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.breakdown import DEVICE_PARTS, PARTS, Breakdown
from gpulab.analysis.cores import core_wait_in_loading, core_wait_within_data_wait
from gpulab.analysis.loader import loads_itself, share_beside

if TYPE_CHECKING:
    from gpulab.analysis.facts import Facts

_WAITS = ("data_wait", "core_wait")  # on a CPU these are known for every step


class StepShares(Struct, frozen=True):
    """The share of each part in a typical step, and the length of that step (µs).

    `share` has every name of `PARTS` and sums to 1 with `undivided`: without a trace only the waits are known.
    `profiled_count`: number of steps that show how the rest divides. `waits_known`: waits are those of all counted
    steps.
    """

    share: Mapping[str, float]
    step_us: float | None
    undivided: float = 0.0
    profiled_count: int = 0
    waits_known: bool = False

    def of(self, *parts: str) -> float:
        """The sum of these parts' shares."""
        return sum(self.share[part] for part in parts)

    def us(self, *parts: str) -> float | None:
        """The same in µs of the typical step; None if the step was not measured."""
        return None if self.step_us is None else self.of(*parts) * self.step_us

    @property
    def idle(self) -> float:
        """On a GPU: the share in which the device does nothing."""
        return max(0.0, 1 - self.of(*DEVICE_PARTS))


def step_shares(facts: Facts) -> StepShares | None:
    """The shares of a run's typical step; None if nothing shows how a step divides."""
    account = facts.breakdown
    return _without_trace(facts) if account is None or not account.steps else shares_on(facts, account)


def shares_on(facts: Facts, account: Breakdown) -> StepShares:
    """The same for the accounting of one of the run's devices, which must have a step."""
    step = facts.typical_step_us
    step_us = account.mean_step_us if step is None else step.median
    if account.whole_window:
        return StepShares(dict(account.share), step_us, profiled_count=len(account.steps))
    typical, on_cpu = _typical(account), account.device_index is None
    share = _on_cpu(facts, typical) if on_cpu else _on_gpu(facts, account, typical)
    return StepShares(
        share, step_us, profiled_count=len(account.steps), waits_known=on_cpu and facts.step_us is not None
    )


def _without_trace(facts: Facts) -> StepShares | None:
    """The waits alone. None on a GPU: it may work while the loop waits, so only a trace shows its parts."""
    step, waited = facts.typical_step_us, facts.data_wait_fraction
    if step is None or waited is None or facts.run.device.kind == "cuda":
        return None
    waits = _waits(facts, min(1.0, waited), 0.0)
    share = dict.fromkeys(PARTS, 0.0) | waits
    return StepShares(share, step.median, undivided=max(0.0, 1 - sum(waits.values())), waits_known=True)


def _typical(account: Breakdown) -> dict[str, float]:
    """The median of each part over the profiled steps, so that one odd step does not matter; the shares sum to 1."""
    medians = {part: account.typical_share(part) for part in PARTS if part != "start_up"}
    whole = sum(medians.values())
    if whole <= 0:
        return dict(account.share)
    return {part: medians.get(part, 0.0) / whole for part in PARTS}


def _on_cpu(facts: Facts, typical: Mapping[str, float]) -> dict[str, float]:
    """The waits of all steps; the rest is divided as in the profiled steps."""
    waited, beside = facts.data_wait_fraction, share_beside(facts.run)
    if waited is None:
        waited = typical["data_wait"] if beside is None else beside
    waits = _waits(facts, min(1.0, waited), typical["core_wait"])
    rest = max(0.0, 1 - sum(waits.values()))
    return _filled({part: typical[part] for part in PARTS if part not in _WAITS}, rest) | waits


def _waits(facts: Facts, waited: float, core_wait: float) -> dict[str, float]:
    """The shares of waiting for data, and for a core outside it: a loop that loads itself also lacks cores there.

    Outside the wait for data, the share without a core is at most its share of all time in which the thread is ready:
    part of the core wait occurs when the thread wakes up with its batch.
    """
    cores = facts.cores
    if cores is not None and cores.thread_wait_fraction is not None:
        missed = cores.thread_wait_fraction
        ready = missed + (cores.thread_cpu_fraction or 0.0)
        loading = waited * core_wait_in_loading(facts) if loads_itself(facts.run) else 0.0
        core_wait = min(missed - loading, (1 - waited) * missed / ready) if ready > 0 else 0.0
    return {"data_wait": waited, "core_wait": min(max(0.0, core_wait), 1 - waited)}


def own_shares(facts: Facts) -> StepShares | None:
    """The shares as on a quiet machine: waits for a core are taken out, and the rest is the whole."""
    shares = facts.shares
    if shares is None:
        return None
    waited = max(0.0, shares.of("data_wait") - core_wait_within_data_wait(facts))
    rest = dict(shares.share) | {"core_wait": 0.0, "data_wait": waited}
    whole = max(sum(rest.values()) + shares.undivided, 1e-9)
    own = {part: share / whole for part, share in rest.items()}
    return replace(shares, share=own, undivided=shares.undivided / whole)


def _on_gpu(facts: Facts, account: Breakdown, typical: Mapping[str, float]) -> dict[str, float]:
    """The profiler makes launches longer, but not kernels: the device's work takes as long as in profiled steps.

    The rest of an unprofiled step is divided among the causes of idling. "data_wait" keeps its share of the whole step.
    """
    idle = max(0.0, 1 - sum(typical[part] for part in DEVICE_PARTS))
    waited = typical["data_wait"]
    if facts.step_us is None:  # steps may wait in bursts: use all of them together
        waited = account.share["data_wait"]
        idle = max(idle, waited)
    elif facts.step_us.median > 0:
        busy_ns = [sum(step.parts_ns[part] for part in DEVICE_PARTS) for step in account.steps]
        idle = max(0.0, min(idle, 1 - float(np.median(busy_ns)) / 1e3 / facts.step_us.median))
    looped = facts.data_wait_fraction
    waited = min(waited, idle, 1.0 if looped is None else looped)  # no longer than the loop itself is blocked
    device = _filled({part: typical[part] for part in DEVICE_PARTS}, 1 - idle)
    causes = {part: typical[part] for part in PARTS if part not in (*DEVICE_PARTS, "data_wait")}
    return dict.fromkeys(PARTS, 0.0) | device | _filled(causes, idle - waited) | {"data_wait": waited}


def _filled(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Scale these parts so that they sum to `whole`; if all are 0, the whole is "unknown"."""
    total = sum(parts.values())
    if total > 0:
        return {part: share * whole / total for part, share in parts.items()}
    names: Sequence[str] = tuple(parts)
    return dict.fromkeys(names, 0.0) | ({"unknown": whole} if "unknown" in names else {})
