"""What a GPU can do at most: dense TFLOP/s by number format, from the makers' data sheets, and its matrix units.

An unknown GPU has no row: nothing falls back to another one's figures.
"""

from __future__ import annotations

import re

from msgspec import Struct

from gpulab.run import Device


class Peaks(Struct, frozen=True):
    """Dense, without sparsity. None: the GPU has no such units."""

    fp32_tflops: float
    tf32_tflops: float | None
    fp16_tflops: float
    bf16_tflops: float | None
    bandwidth_gb_s: float


# the first that matches; makers' data sheets, as in the project's table of definitions; a laptop's GPU of that name is
# another chip
_TABLE: tuple[tuple[str, Peaks], ...] = (
    (r"\bT4\b", Peaks(8.1, None, 65, None, 320)),
    (r"V100", Peaks(15.7, None, 125, None, 900)),
    (r"\bA10\b|\bA10G\b", Peaks(31.2, 62.5, 125, 125, 600)),
    (r"A100.*80", Peaks(19.5, 156, 312, 312, 2039)),
    (r"A100", Peaks(19.5, 156, 312, 312, 1555)),
    (r"\bL4\b", Peaks(30.3, 60, 121, 121, 300)),
    (r"\bL40S\b", Peaks(91.6, 183, 362, 362, 864)),
    (r"RTX 3090(?! Ti| Laptop)", Peaks(35.6, 35.6, 71, 71, 936)),
    (r"RTX 4090(?! D| Laptop)", Peaks(82.6, 82.6, 165.2, 165.2, 1008)),
    (r"RTX 5090(?! D| Laptop)", Peaks(104.8, 104.8, 209.5, 209.5, 1792)),
    (r"H100.*NVL", Peaks(60, 418, 835, 835, 3900)),
    (r"H100.*PCIe", Peaks(51, 378, 756, 756, 2000)),
    (r"H100", Peaks(67, 494.5, 989, 989, 3350)),
    (r"\bH200\b", Peaks(67, 494.5, 989, 989, 4800)),
    (r"\bB200\b", Peaks(80, 1125, 2250, 2250, 8000)),
    (r"MI300X", Peaks(163.4, 653.7, 1307, 1307, 5300)),
)

# Cards of compute capability 7.5 that have no matrix units: NVIDIA's GTX 16 series and its workstation relatives.
_WITHOUT_UNITS = re.compile(r"GTX 16|\bMX\d{3}|\bT[456]00\b|\bT1[02]00\b|\bT1000\b|\bT2000\b")
_OTHER_MAKERS = re.compile(r"AMD|Radeon|Instinct|Intel", re.IGNORECASE)
UNITS_SINCE = (7, 0)
BF16_SINCE = (8, 0)


def peaks_of(name: str) -> Peaks | None:
    """Of the GPU of that name, as its driver gives it ("NVIDIA A100-SXM4-80GB"); None for one that is not listed."""
    return next((peaks for pattern, peaks in _TABLE if re.search(pattern, name, re.IGNORECASE)), None)


def compute_capability(device: Device) -> tuple[int, int] | None:
    """(9, 0) of a GPU of NVIDIA's; None where it is not known or the GPU is another maker's."""
    version = re.fullmatch(r"(\d+)\.(\d+)", str(device.details.get("compute_capability") or ""))
    if version is None or _OTHER_MAKERS.search(device.name):
        return None
    return int(version[1]), int(version[2])


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
    peaks = peaks_of(device.name)
    return None if peaks is None else peaks.fp16_tflops / peaks.fp32_tflops


def tf32_ratio(device: Device) -> float | None:
    """TF32 products against those of float32, likewise; None also without the units."""
    peaks = peaks_of(device.name)
    return None if peaks is None or peaks.tf32_tflops is None else peaks.tf32_tflops / peaks.fp32_tflops
