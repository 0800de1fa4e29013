"""On which GPU a run really was: before the user's code starts CUDA nobody knows, and the first one is assumed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from gpulab.devices.machine import detect_device
from gpulab.errors import UsageError
from gpulab.intervals import measure
from gpulab.run import DEVICE_CATEGORIES, Choice, Device, Missing, Samples, Timeline
from gpulab.timeline import spans


class Moved(Struct, frozen=True):
    """The device of a run that was on another GPU than assumed, its curves without the wrong GPU's, and what to say."""

    device: Device
    samples: Samples
    choices: tuple[Choice, ...] = ()
    missing: tuple[Missing, ...] = ()


def working_gpus(timeline: Timeline | None) -> list[int]:
    """The numbers of the GPUs that worked in a trace, the one that worked longest first."""
    if timeline is None:
        return []
    work = spans.in_category(timeline, *DEVICE_CATEGORIES)
    busy = {i: measure(spans.covered(timeline, work & spans.on_device(timeline, i))) for i in spans.devices(timeline)}
    return sorted(busy, key=lambda i: -busy[i])


def moved(device: Device, worked: Sequence[int], samples: Samples) -> Moved:
    """The same device and curves where it worked, too, or nobody knows; else those of the GPU that worked most.

    `worked` are numbers of GPUs, the busiest first.
    """
    if device.kind != "cuda" or not worked or device.index in worked:
        return Moved(device, samples)
    used = worked[0]
    try:
        device_used = detect_device(f"cuda:{used}")
    except UsageError:
        return Moved(device, samples)
    reason = f"the code ran on GPU {used}, and not on GPU {device.index}, which was assumed when the run began"
    kept = tuple(s for s in samples.series if not s.source.startswith("NVML"))
    lost = (Missing("GPU curves", f"they were of GPU {device.index}: {reason}", key="curves"),)
    return Moved(
        device_used,
        Samples(kept),
        (Choice("device", f"GPU {used}: {device_used.name}", reason),),
        lost if len(kept) < len(samples.series) else (),
    )
