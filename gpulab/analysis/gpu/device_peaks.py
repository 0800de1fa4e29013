"""What a GPU can do at most: dense TFLOP/s by number format and memory bandwidth, from the makers' data sheets.

An unknown GPU has no row: nothing falls back to another one's figures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peaks:
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


def peaks_of(name: str) -> Peaks | None:
    """Of the GPU of that name, as its driver gives it ("NVIDIA A100-SXM4-80GB"); None for one that is not listed."""
    return next((peaks for pattern, peaks in _TABLE if re.search(pattern, name, re.IGNORECASE)), None)
