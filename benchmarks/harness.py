"""Common ground of the benchmarks: paired block ratios with an interval, the machine, the result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from msgspec.structs import asdict

RESULTS = Path(__file__).parent / "results"
RESAMPLES = 5000


def ratio_with_interval(ratios: Sequence[float], seed: int = 0) -> dict[str, object]:
    """Median of paired block ratios and its 95 % bootstrap interval (definitions.md, "Honest comparison")."""
    values = np.asarray(ratios, dtype=float)
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(values, size=(RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"ratio": float(np.median(values)), "interval": [float(low), float(high)], "pairs": len(values)}


def save(name: str, result: dict[str, object]) -> None:
    """Write one benchmark's result with the machine and the versions it was measured on."""
    from gpulab.devices.machine import environment

    machine = asdict(environment())
    machine.pop("hostname")
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(
        {"benchmark": name, "measured": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine, **result}, indent=1
    )
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
