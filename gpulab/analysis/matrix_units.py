"""How much faster a GPU multiplies matrices in fewer bits, at best: from its data sheet, else from its generation."""

from __future__ import annotations

import re

from gpulab.analysis.device_peaks import peaks_of
from gpulab.run import Device

# The largest ratio to float32 within each generation (compute capability), from the makers' data sheets.
_MOST_16_BIT = {"7.0": 8.0, "7.2": 8.0, "7.5": 8.0, "8.0": 16.0, "8.6": 4.0, "8.9": 4.0, "9.0": 14.8, "10.0": 28.1}
_MOST_TF32 = {"8.0": 8.0, "8.6": 2.0, "8.9": 2.0, "9.0": 7.4, "10.0": 14.1}
# Cards of compute capability 7.5 that have no matrix units: NVIDIA's GTX 16 series and its workstation relatives.
_WITHOUT_UNITS = re.compile(r"GTX 16|\bMX\d{3}|\bT[456]00\b|\bT1[02]00\b|\bT1000\b|\bT2000\b")
_OTHER_MAKERS = re.compile(r"AMD|Radeon|Instinct|Intel", re.IGNORECASE)
BF16_SINCE = (8, 0)


def compute_capability(device: Device) -> tuple[int, int] | None:
    """(9, 0) of a GPU of NVIDIA's; None where it is not known or the GPU is another maker's."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(device.details.get("compute_capability") or ""))
    if found is None or _OTHER_MAKERS.search(device.name):
        return None
    return int(found[1]), int(found[2])


def narrow_ratio(device: Device) -> float | None:
    """16-bit products against those of float32; None without the units, or where neither table knows the GPU."""
    known = peaks_of(device.name)
    if known is not None:
        return known.fp16_tflops / known.fp32_tflops
    return None if _WITHOUT_UNITS.search(device.name) else _MOST_16_BIT.get(_generation(device))


def tf32_ratio(device: Device) -> float | None:
    """TF32 products against those of float32, likewise."""
    known = peaks_of(device.name)
    if known is not None:
        return known.tf32_tflops / known.fp32_tflops if known.tf32_tflops is not None else None
    return _MOST_TF32.get(_generation(device))


def _generation(device: Device) -> str:
    found = compute_capability(device)
    return "" if found is None else f"{found[0]}.{found[1]}"


__all__ = ["BF16_SINCE", "compute_capability", "narrow_ratio", "tf32_ratio"]
