"""Common ground of the benchmarks: figures, paired ratios with an interval, result files, processes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
RESAMPLES = 5000


class Figure(Struct, frozen=True):
    """One line of the table. `unit`: "s", "ms", "µs" (added), "MiB", "%" of a share, "+%" of a ratio, "×", or none.

    `target`: its key among the targets of the benchmark in targets.toml. None as the value: not measured.
    """

    what: str
    value: float | None
    unit: str = ""
    interval: Sequence[float] | None = None
    target: str = ""
    words: str = ""  # in place of the value as it is usually shown

    @classmethod
    def of_ratio(cls, what: str, ratio: Mapping[str, Any] | None, unit: str, target: str = "") -> Figure:
        """A ratio with its interval, as `ratio_with_interval` gives it."""
        value, interval = (None, None) if ratio is None else (ratio["ratio"], ratio["interval"])
        return cls(what, value, unit, interval, target)

    @classmethod
    def share(cls, what: str, part: int, whole: int, target: str = "") -> Figure:
        """So many of so many."""
        value = part / whole if whole else None
        return cls(what, value, "%", target=target, words=f"{part} of {whole}" + (f" ({value:.0%})" if value else ""))

    @classmethod
    def count(cls, what: str, part: int, whole: int, target: str = "") -> Figure:
        """A number that should be small, of so many."""
        return cls(what, part, target=target, words=f"{part} of {whole}")


def ratio_with_interval(ratios: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Median of paired block ratios and its 95 % bootstrap interval (definitions.md, "Honest comparison")."""
    values = np.asarray(ratios, dtype=float)
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(values, size=(RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"ratio": float(np.median(values)), "interval": [float(low), float(high)], "pairs": len(values)}


def save(name: str, result: Mapping[str, object]) -> None:
    """Write one benchmark's result with the machine and the versions it was measured on."""
    from gpulab.devices.machine import environment

    machine = asdict(environment())
    machine.pop("hostname")
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(
        {"benchmark": name, "measured": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine, **result}, indent=1
    )
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def in_own_process(module: str, function: str, **arguments: object) -> dict[str, Any]:
    """What that function gives, called with plain data; its prints pass through. Raises CalledProcessError."""
    return in_limited_process(module, function, arguments)


def in_limited_process(
    module: str, function: str, arguments: Mapping[str, object], *, limit_s: float | None = None
) -> dict[str, Any]:
    """The same. A process that takes longer than `limit_s` is killed, and TimeoutExpired raised."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        subprocess.run(
            [sys.executable, "-m", "benchmarks.harness", module, function, json.dumps(arguments), str(answer)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=True,
            timeout=limit_s,
        )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """The other side of `in_own_process`: `module function arguments answer`."""
    module, function, arguments, answer = sys.argv[1:]
    found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
