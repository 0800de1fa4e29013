"""`python -m benchmarks memory_fit`: does the predicted batch size fit, and do the proposed cures?

Ten cells (memory_models.py) run under a limit of address space, where the allocator really fails. The oracle is a
bisection without gpulab: the largest batch size that runs, each size in a process of its own, forked from the same one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from subprocess import CalledProcessError
from typing import Any

from benchmarks.harness import Figure, in_own_process
from benchmarks.memory_models import FITS

ROOM_BYTES = 400 << 20
RESOLUTION = 0.02  # of the bisection
NEAR = 0.05
UPDATES = 3  # after which a size is said to run
MMAP_THRESHOLD = "65536"  # glibc returns freed tensors at once; its fragments would move the limit itself


def measure() -> dict[str, Any]:
    """Each cell: the prediction from cheap runs, the bisection, and each proposed cure at twice that size."""
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
    import gpulab
    from gpulab.api.memory import fit, prove
    from gpulab.memory.room import room_of, status_bytes
    from gpulab.memory.survey import empty_caches
    from gpulab.tuning.code import Code
    from gpulab.tuning.fit import Prober

    namespace: dict[str, Any] = {"__name__": "__main__"}
    cell = Code.of_text(code, namespace)
    with gpulab.profile(show=False, save=False, steps=3, code=code):  # as in a notebook: its threads have run
        exec(compile(code, "<cell>", "exec"), dict(namespace))
    Prober(cell).within(lambda: None)  # imports
    used = status_bytes("VmSize") or 0
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    found = fit(cell, least_free=0.0, show=False).result
    if found.line is None:
        return {"predicted": None, "probes": [[p.size, p.peak_bytes, p.failure] for p in found.probes]}
    empty_caches()
    room = room_of(None)
    assert room is not None
    before = found.allowed_bytes - (1 - found.free_fraction) * found.room.free_bytes
    whole, largest = found.line.largest(before + room.free_bytes), _bisected(code)
    big = Code.of_text(_with_size(code, 2 * largest), namespace)
    again = fit(big, show=False)
    cures = {}
    for cure in again.result.cures:
        probe = prove(cure.settings, again, big).proof.probe
        cures[json.dumps(dict(cure.settings))] = {
            "fits": probe.fits,
            "peak": probe.peak_bytes,
            "told": cure.peak_bytes,
            "failure": probe.failure,
        }
    return {
        "predicted": whole,
        "proven": found.proven,
        "largest": largest,
        "allowed": found.predicted,
        "cures": cures,
        "probes": [[p.size, p.peak_bytes, p.failure] for p in found.probes],
    }


def _with_size(code: str, size: int) -> str:
    return re.sub(r"^batch_size = \d+", f"batch_size = {size}", code, count=1, flags=re.M)


def _bisected(code: str) -> int:
    """The largest batch size that runs, within the resolution."""
    fits, fails = 1, 0
    while not fails or fails - fits > max(1, RESOLUTION * fits):
        size = (fits + fails) // 2 if fails else 2 * fits
        if _runs(_with_size(code, size)):
            fits = size
        else:
            fails = size
    return fits


def _runs(code: str) -> bool:
    """Whether a copy of this process runs the first steps of the code."""
    from torch.optim.optimizer import register_optimizer_step_post_hook as after_each_update

    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    updates = itertools.count(1)

    def end_early(*_: object) -> None:
        if next(updates) == UPDATES:
            os._exit(0)

    try:
        after_each_update(end_early)
        exec(compile(code, "<cell>", "exec"), {"__name__": "__main__"})
    finally:
        os._exit(1)


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
