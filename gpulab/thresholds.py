"""The thresholds for findings and alerts: figures with their source, which a user may change."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import UsageError

IN_ORDER = (  # pairs: the first must not be larger than the second
    *((f"{kind}_notice", f"{kind}_bad") for kind in ("data_wait", "launch", "exposed")),
    ("memory_underused", "memory_full"),
)


class Thresholds(Struct, frozen=True):
    """Each with its source ("ours": gpulab's choice). Shares are fractions of a step unless noted; suffixes: units."""

    silence: float = 0.03  # ours: a fix that saves less than 3 % of a step is hardly worth an edit
    data_wait_notice: float = 0.10  # TraceML: warn at 10 % of a step
    data_wait_bad: float = 0.20  # TraceML: critical at 20 % of a step
    # ours: as data_wait_notice; on a quiet machine a thread waits 1 to 3 % of its time for a core
    core_wait_notice: float = 0.10
    idle_notice: float = 0.15  # ours: even a busy pipeline has gaps between kernels, usually below 15 %
    # ours: half of idle_notice, because CPU operators next to an idle GPU are not a normal gap
    on_cpu_notice: float = 0.075
    # xprof: launch-bound from 3 %, critical from 15 %; applies only if idle_notice is reached, too
    launch_notice: float = 0.03
    launch_bad: float = 0.15  # xprof: launch-bound from 3 %, critical from 15 %
    exposed_notice: float = 0.05  # ours: below 5 % communication counts as overlapped
    exposed_bad: float = 0.15  # ours: three times exposed_notice
    small_collectives: float = 20.0  # ours: so many short ones per step are gradients in tiny buckets, or scalars
    small_collective_gpu_us: float = 60.0  # ours: twice what NCCL takes for a few bytes between GPUs of one machine
    # ours: several times what gloo takes for a few bytes, also on a busy machine
    small_collective_cpu_us: float = 2000.0
    uneven_samples: float = 0.10  # ours: waiting for a rank with a tenth more data than the others is no accident
    skew_notice: float = 0.05  # ours: same as exposed_notice, because waiting for another rank is exposed communication
    unknown_too_much: float = 0.40  # ours: above 40 % unknown time gpulab names no cause
    # ours: saving, logging and garbage collection are overhead, but a little is good practice
    pause_notice: float = 0.05
    evaluation_notice: float = 0.20  # ours: evaluation is intended, so it is reported only above a fifth of the time
    loading_cause: float = 0.50  # ours: a cause of slow loading is named if it takes at least half of a batch's time
    fixed_notice: float = 0.50  # ours: the part that does not grow with the batch is the larger part
    # ours: less than calling_notice, because time that other findings report is not counted
    calling_left_notice: float = 0.15
    calling_notice: float = 0.25  # ours: in planted cells with small batches 26 % and more, in healthy ones at most 8 %
    rearranging_notice: float = 0.10  # ours: on a CPU attention heads and gradients need up to 10 % in any case
    short_kernel_us: float = 10.0  # ours: a shorter kernel costs less than its launch, which takes 5 to 20 µs
    # ours: half of the kernel time underfills the GPU, so a larger batch costs little
    small_kernels_notice: float = 0.50
    # ours: the profiler slows small operators on a CPU; a smaller share may be its overhead
    optimizer_cpu_notice: float = 0.15
    # ours: on a CPU operator time includes call overhead; a small share may be overhead alone
    attention_cpu_notice: float = 0.10
    # ours: as attention_cpu_notice, but higher: call overhead weighs more in short operators
    pointwise_cpu_notice: float = 0.15
    matrix_material: float = 0.20  # ours: below 20 % of the kernel time faster matmuls change little
    memory_full: float = 0.90  # ours: above 90 % the allocator starts to free and re-request memory
    memory_underused: float = 0.50  # Gao et al., ICSE 2024: a batch is small if peak memory stays below 50 % …
    utilization_low: float = 0.50  # Gao et al., ICSE 2024: … and mean utilization is below 50 %
    sm_active_low: float = 0.50  # DCGM: SM active below 0.5 likely means that the GPU is not used effectively
    readings_notice: float = 0.10  # ours: a share of a meter's readings; a state in fewer readings is momentary
    slowed_notice: float = 0.03  # ours: same as silence: a clock 3 % below its maximum costs about 3 % of compute
    alert_data_wait: float = 0.50  # ours: half of each step; short data waits need no alert
    alert_gpu_idle: float = 0.70  # ours: utilization (NVML) below 30 %; a live hint, not a diagnosis
    alert_after_s: float = 20.0  # ours: a state that ends within seconds needs no action

    def changed(self, values: Mapping[str, object]) -> Thresholds:
        """The thresholds with `values` set. Raises UsageError for an unknown name, a bad value or a contradiction."""
        thresholds = replace(self, **{name: _checked(name, value) for name, value in values.items()})
        for low, high in IN_ORDER:
            less, more = getattr(thresholds, low), getattr(thresholds, high)
            if less > more:
                raise UsageError(
                    f"The thresholds {low}={less:g} and {high}={more:g} contradict each other: "
                    "the first must not be larger."
                )
        return thresholds


_COUNTS = ("small_collectives",)


def _checked(name: str, value: object) -> float:
    names = Thresholds.__struct_fields__
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)[0]
        raise UsageError(f"There is no threshold {name!r}. Nearest: {nearest} (of {', '.join(sorted(names))}).")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"The threshold {name} is a number, not {value!r}.")
    if name in _COUNTS:
        if value < 0:
            raise UsageError(f"The threshold {name} is a number per step, not {value:g}.")
        return float(value)
    unit = next((unit for suffix, unit in (("_us", "µs"), ("_s", "s")) if name.endswith(suffix)), None)
    if unit is not None and value < 0:
        raise UsageError(f"The threshold {name} is a time in {unit}, not {value:g}.")
    if unit is None and not 0 <= value <= 1:
        raise UsageError(f"The threshold {name} is a share from 0 to 1, not {value:g}.")
    return float(value)


DEFAULT = Thresholds()
