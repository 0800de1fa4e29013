"""The limits from which a finding or an alert is reported: figures with their source, which a user may change."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import UsageError

IN_ORDER = (  # the first of two must not be larger
    *((f"{kind}_notice", f"{kind}_bad") for kind in ("data_wait", "launch", "exposed")),
    ("memory_underused", "memory_full"),
)


class Thresholds(Struct, frozen=True):
    """Each with its source. Shares are fractions of a step unless they say otherwise; a suffix names another unit."""

    silence: Annotated[float, "ours: a fix that saves less than 3 % of a step is hardly worth an edit"] = 0.03
    data_wait_notice: Annotated[float, "TraceML: warn at 10 % of a step"] = 0.10
    data_wait_bad: Annotated[float, "TraceML: critical at 20 % of a step"] = 0.20
    core_wait_notice: Annotated[
        float, "ours: as data_wait_notice; on a quiet machine a thread waits 1 to 3 % of its time for a core"
    ] = 0.10
    idle_notice: Annotated[float, "ours: even a busy pipeline has gaps between kernels, usually below 15 %"] = 0.15
    on_cpu_notice: Annotated[
        float, "ours: half of idle_notice, because CPU operators next to an idle GPU are not a normal gap"
    ] = 0.075
    launch_notice: Annotated[
        float, "xprof: launch-bound from 3 %, critical from 15 %; applies only if idle_notice is reached, too"
    ] = 0.03
    launch_bad: Annotated[float, "xprof: launch-bound from 3 %, critical from 15 %"] = 0.15
    exposed_notice: Annotated[float, "ours: below 5 % communication counts as overlapped"] = 0.05
    exposed_bad: Annotated[float, "ours: three times exposed_notice"] = 0.15
    small_collectives: Annotated[
        float, "ours: so many short ones per step are gradients in tiny buckets, or scalars"
    ] = 20.0
    small_collective_gpu_us: Annotated[
        float, "ours: twice what NCCL takes for a few bytes between GPUs of one machine"
    ] = 60.0
    small_collective_cpu_us: Annotated[
        float, "ours: several times what gloo takes for a few bytes, also on a busy machine"
    ] = 2000.0
    uneven_samples: Annotated[
        float, "ours: with a tenth more data than the others, waiting for that rank is not chance"
    ] = 0.10
    skew_notice: Annotated[
        float, "ours: same as exposed_notice, because waiting for another rank is exposed communication"
    ] = 0.05
    unknown_too_much: Annotated[float, "ours: above 40 % unknown time gpulab names no cause"] = 0.40
    pause_notice: Annotated[
        float, "ours: saving, logging and garbage collection are overhead, but a little is good practice"
    ] = 0.05
    evaluation_notice: Annotated[
        float, "ours: evaluation is intended, so it is reported only above a fifth of the time"
    ] = 0.20
    loading_cause: Annotated[
        float, "ours: a cause of slow loading is named if it takes at least half of a batch's time"
    ] = 0.50
    fixed_notice: Annotated[float, "ours: what does not grow with the batch takes longer than what does"] = 0.50
    calling_left_notice: Annotated[
        float, "ours: less than calling_notice, because time that other findings report is not counted"
    ] = 0.15
    calling_notice: Annotated[
        float, "ours: in planted cells with small batches 26 % and more, in healthy ones at most 8 %"
    ] = 0.25
    rearranging_notice: Annotated[float, "ours: on a CPU attention heads and gradients need up to 10 % in any case"] = (
        0.10
    )
    short_kernel_us: Annotated[float, "ours: a shorter kernel costs less than its launch, which takes 5 to 20 µs"] = (
        10.0
    )
    small_kernels_notice: Annotated[
        float, "ours: half of the kernel time underfills the GPU, so a larger batch costs little"
    ] = 0.50
    optimizer_cpu_notice: Annotated[
        float, "ours: the profiler slows small operators on a CPU; a smaller share may be its overhead"
    ] = 0.15
    attention_cpu_notice: Annotated[
        float, "ours: on a CPU operator time includes call overhead; a small share may be overhead alone"
    ] = 0.10
    pointwise_cpu_notice: Annotated[
        float, "ours: as attention_cpu_notice, but higher: call overhead weighs more in short operators"
    ] = 0.15
    matrix_material: Annotated[float, "ours: below 20 % of the kernel time faster matmuls change little"] = 0.20
    memory_full: Annotated[float, "ours: above 90 % the allocator starts to free and re-request memory"] = 0.90
    memory_underused: Annotated[float, "Gao et al., ICSE 2024: a batch is small if peak memory stays below 50 % …"] = (
        0.50
    )
    utilization_low: Annotated[float, "Gao et al., ICSE 2024: … and mean utilization is below 50 %"] = 0.50
    sm_active_low: Annotated[float, "DCGM: SM active below 0.5 likely means that the GPU is not used effectively"] = (
        0.50
    )
    readings_notice: Annotated[float, "ours: a share of a meter's readings; a state in fewer readings is momentary"] = (
        0.10
    )
    slowed_notice: Annotated[
        float, "ours: same as silence: a clock 3 % below its maximum costs about 3 % of compute"
    ] = 0.03
    alert_data_wait: Annotated[float, "ours: half of each step; short data waits need no alert"] = 0.50
    alert_gpu_idle: Annotated[float, "ours: utilization (NVML) below 30 %; a live hint, not a diagnosis"] = 0.70
    alert_after_s: Annotated[float, "ours: a state that ends within seconds needs no action"] = 20.0

    def changed(self, values: Mapping[str, object]) -> Thresholds:
        """With these set. Raises UsageError for a name that is none, a value out of range or two that contradict."""
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
SOURCES: Mapping[str, str] = {
    name: declared.__metadata__[0] for name, declared in get_type_hints(Thresholds, include_extras=True).items()
}
