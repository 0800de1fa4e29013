"""On which GPU a run really was: before the user's code starts CUDA nobody knows, and the first one is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.analysis import spans
from gpulab.errors import UsageError
from gpulab.intervals import measure
from gpulab.run import DEVICE_CATEGORIES, Choice, Device, Missing, Samples, Timeline
from gpulab.sources.machine import detect_device


@dataclass(frozen=True, slots=True)
class Moved:
    """The device of a run that was on another GPU than assumed, its curves without the wrong GPU's, and what to say."""

    device: Device
    samples: Samples
    choices: tuple[Choice, ...] = ()
    missing: tuple[Missing, ...] = ()


def busiest_gpu(timeline: Timeline | None) -> int | None:
    """The number of the GPU that worked longest in a trace; None where there is none."""
    if timeline is None:
        return None
    work = spans.in_category(timeline, *DEVICE_CATEGORIES)
    busy = {i: measure(spans.covered(timeline, work & spans.on_device(timeline, i))) for i in spans.devices(timeline)}
    return max(busy, key=lambda i: busy[i], default=None)


def moved(device: Device, used: int | None, samples: Samples) -> Moved:
    """The same device and curves where `used` is its number or unknown; else those of GPU number `used`."""
    if device.kind != "cuda" or used is None or used == device.index:
        return Moved(device, samples)
    try:
        device_used = detect_device(f"cuda:{used}")
    except UsageError:
        return Moved(device, samples)
    reason = f"the code ran on GPU {used}, not on GPU {device.index}, which was assumed before it started CUDA"
    kept = tuple(s for s in samples.series if not s.source.startswith("NVML"))
    lost = (Missing("GPU curves", f"they were of GPU {device.index}: {reason}", key="curves"),)
    return Moved(
        device_used,
        Samples(kept),
        (Choice("device", f"GPU {used}: {device_used.name}", reason),),
        lost if len(kept) < len(samples.series) else (),
    )


__all__ = ["Moved", "busiest_gpu", "moved"]
