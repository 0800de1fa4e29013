"""How much faster a GPU multiplies matrices in fewer bits, at best: by its data sheet, or it is not known."""

from __future__ import annotations

import re

from gpulab.analysis.gpu.device_peaks import peaks_of
from gpulab.run import Device

# Cards of compute capability 7.5 that have no matrix units: NVIDIA's GTX 16 series and its workstation relatives.
_WITHOUT_UNITS = re.compile(r"GTX 16|\bMX\d{3}|\bT[456]00\b|\bT1[02]00\b|\bT1000\b|\bT2000\b")
_OTHER_MAKERS = re.compile(r"AMD|Radeon|Instinct|Intel", re.IGNORECASE)
UNITS_SINCE = (7, 0)
BF16_SINCE = (8, 0)


def compute_capability(device: Device) -> tuple[int, int] | None:
    """(9, 0) of a GPU of NVIDIA's; None where it is not known or the GPU is another maker's."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(device.details.get("compute_capability") or ""))
    if found is None or _OTHER_MAKERS.search(device.name):
        return None
    return int(found[1]), int(found[2])


def has_units(device: Device) -> bool | None:
    """Whether it has units that multiply matrices of 16-bit numbers; None: not known."""
    if peaks_of(device.name) is not None:
        return True
    if _WITHOUT_UNITS.search(device.name):
        return False
    generation = compute_capability(device)
    return None if generation is None else generation >= UNITS_SINCE


def narrow_ratio(device: Device) -> float | None:
    """16-bit products against those of float32; None for a GPU that the table does not hold.

    No other GPU stands in for it (definitions.md, "Hardware table"): within a generation the ratios differ too.
    """
    known = peaks_of(device.name)
    return None if known is None else known.fp16_tflops / known.fp32_tflops


def tf32_ratio(device: Device) -> float | None:
    """TF32 products against those of float32, likewise; None also without the units."""
    known = peaks_of(device.name)
    return None if known is None or known.tf32_tflops is None else known.tf32_tflops / known.fp32_tflops
