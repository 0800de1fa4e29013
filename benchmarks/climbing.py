"""The demo's cell, climbed to where nothing is left: what was tried, what was kept, and the edit."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from benchmarks.own_process import in_own_process


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
        found = gpulab.climb(cell.TRAINING, namespace=names, show=False, save=False)
    told = found.json()
    return {
        key: told[key] for key in ("headline", "ended", "seconds", "kept", "edit", "rungs", "left", "not_tried")
    } | {"ratio": found.ratio, "interval": found.interval and list(found.interval)}


def section(kept: dict[str, Any]) -> list[str]:
    """For the table."""
    lines = [
        "## The climb of the demo's cell",
        "",
        f"{kept['headline']['sentence']} {kept['headline']['evidence']} It took {kept['seconds']:.0f} s.",
        "",
        "| tried | because of | predicted | measured: time of a step over that of the rung before | loss | outcome |",
        "|---|---|---|---|---|---|",
    ]
    for rung in kept["rungs"]:
        made = rung["prediction"] or {}
        cells = (
            ", ".join(f"{name}={value}" for name, value in rung["settings"].items()),
            rung["finding"],
            _ratio(made.get("ratio"), made.get("interval")),
            _ratio(rung["ratio"], rung["interval"]),
            rung["loss"] or "–",
            f"{rung['outcome']}: {rung['words']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    left = "; ".join(f["summary"] for f in kept["left"]) or "nothing was looked at again"
    return [
        *lines,
        "",
        f"What is left by then: {left}",
        "",
        *(["```", kept["edit"].strip(), "```"] if kept["edit"] else []),
    ]


def _ratio(ratio: float | None, interval: list[float] | None) -> str:
    if interval is None:
        return "–" if ratio is None else f"{ratio:.2f}"
    return f"{'' if ratio is None else f'{ratio:.2f} '}[{interval[0]:.2f}, {interval[1]:.2f}]"
