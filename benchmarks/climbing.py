"""The demo's cell, climbed to where nothing is left: what was tried, what was kept, and the edit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.harness import Figure, in_own_process


def measure() -> dict[str, object]:
    """The climb as plain data."""
    return in_own_process(__name__, "climbed")


def climbed() -> dict[str, Any]:
    """In this process: earlier cells, then the climb on the training cell, with as many compute threads as cores."""
    import torch

    import gpulab
    from gpulab.demo import cell
    from gpulab.devices.machine import usable_cores

    torch.set_num_threads(int(usable_cores() or 1))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULAB_DIR"] = folder  # earlier predictions of this machine have no say
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(cell.SETUP, "<demo setup>", "exec"), names)
        result = gpulab.climb(cell.TRAINING, namespace=names, show=False, save=False)
    document = result.json()
    return {
        key: document[key] for key in ("headline", "ended", "seconds", "kept", "edit", "rungs", "left", "not_tried")
    } | {"ratio": result.ratio, "interval": result.interval and list(result.interval)}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How long it took, and each rung that was measured."""
    yield Figure("the whole climb, as it ends by itself", results["seconds"], "s", target="seconds")
    for rung in results["rungs"]:
        settings = ", ".join(f"{name}={value}" for name, value in rung["settings"].items())
        ratio = None if rung["ratio"] is None else {"ratio": rung["ratio"], "interval": rung["interval"]}
        yield Figure.of_ratio(f"{settings}, because of {rung['finding']}: {rung['outcome']}", ratio, "×")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """What it says at its end, and the edit."""
    yield f"- {results['headline']['sentence']} {results['headline']['evidence']}"
    yield f"- left by then: {'; '.join(f['summary'] for f in results['left']) or 'nothing was looked at again'}"
    if results["edit"]:
        yield f"\n```\n{results['edit'].strip()}\n```"
