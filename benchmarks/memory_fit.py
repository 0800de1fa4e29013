"""`python -m benchmarks memory_fit`: does the predicted batch size fit, and do the proposed cures?

Ten cells (memory_models.py) run under a limit of address space, where the allocator really fails. The oracle is a
bisection: the largest batch size that runs. Each cell has a process of its own.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Iterator, Mapping
from subprocess import CalledProcessError
from typing import Any

from benchmarks.harness import Figure, in_own_process
from benchmarks.memory_models import FITS

ROOM_BYTES = 400 << 20
RESOLUTION = 0.02  # of the bisection
NEAR = 0.05
MMAP_THRESHOLD = "65536"  # glibc returns freed tensors at once; its fragments would move the limit itself


def measure() -> dict[str, Any]:
    """Each cell: the prediction from two cheap runs, the bisection, and each proposed cure at twice that size."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = MMAP_THRESHOLD
    return {"cells": {name: _result(code) for name, code in FITS.items()}}


def _result(code: str) -> dict[str, Any]:
    """One cell in a process of its own; a process that dies counts as a cell without a prediction."""
    try:
        return in_own_process(__name__, "fit_of", code=code)
    except CalledProcessError as e:
        return {"predicted": None, "failure": f"ended with status {e.returncode}"}


def fit_of(code: str) -> dict[str, Any]:
    """Predict, bisect and cure under a limit."""
    os.environ["GPULAB_DIR"] = tempfile.mkdtemp()
    import torch

    from gpulab.api.memory import fit, prove
    from gpulab.memory.room import status_bytes
    from gpulab.tuning.code import Code
    from gpulab.tuning.fit import Prober

    torch.ones(64, 64) @ torch.ones(64, 64)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cell = Code.of_text(code, namespace)
    Prober(cell).within(lambda: None)  # imports
    used = status_bytes("VmSize") or 0
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    found = fit(cell, least_free=0.0, show=False).result
    if found.line is None:
        return {"predicted": None, "probes": [[p.size, p.peak_bytes, p.failure] for p in found.probes]}
    whole = found.line.largest(found.allowed_bytes + found.free_fraction * found.room.free_bytes)
    largest = _bisected(cell, whole[0] if whole else found.before)
    doubled = code.replace(f"batch_size = {found.before}", f"batch_size = {2 * largest}", 1)
    big = Code.of_text(doubled, namespace)
    again = fit(big, show=False)
    cures = {}
    for cure in again.result.cures:
        probe = prove(cure.settings, again, big).proof.probe
        cures[json.dumps(dict(cure.settings))] = {"fits": probe.fits, "peak": probe.peak_bytes, "told": cure.peak_bytes}
    return {
        "predicted": whole,
        "proven": found.proven,
        "largest": largest,
        "allowed": found.predicted,
        "cures": cures,
        "probes": [[p.size, p.peak_bytes, p.failure] for p in found.probes],
    }


def _bisected(cell: Any, guess: int) -> int:
    """The largest batch size that runs, within the resolution."""
    from gpulab.tuning.fit import STEPS, Prober

    fits = [1, 1 << 30]

    def search() -> None:
        size = guess
        while fits[1] - fits[0] > max(1, RESOLUTION * fits[0]):
            ran = prober.run({"batch_size": size}, size, STEPS, is_trial=True).fits
            fits[0 if ran else 1] = size
            if fits[1] == 1 << 30:
                size = int(1.1 * size) + 1
            elif fits[0] == 1:
                size = int(0.9 * size)
            else:
                size = (fits[0] + fits[1]) // 2

    prober = Prober(cell)
    prober.within(search)
    return fits[0]


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How near predictions come to the bisection, and how many cures fit."""
    cells = [one for one in results["cells"].values() if one["predicted"]]
    near = sum(abs(one["predicted"][0] / one["largest"] - 1) <= NEAR for one in cells)
    inside = sum(one["predicted"][1] <= one["largest"] <= one["predicted"][2] for one in cells)
    count = len(results["cells"])
    yield Figure.share("batch sizes predicted within 5 % of the bisection", near, count, "near")
    yield Figure.share("bisections inside the predicted interval", inside, count)
    proven = [one["proven"] for one in cells]
    yield Figure.share("cells with a proven batch size", sum(p is not None for p in proven), count)
    cures = [cure for one in cells for cure in one["cures"].values()]
    yield Figure.share("proposed cures that really fit", sum(cure["fits"] for cure in cures), len(cures), "cures")


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
