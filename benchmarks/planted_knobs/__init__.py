"""Planted truth: 24 training cells for the CPU, in which it is certain what a knob does, and the verdict about each.

For each of eight knobs one cell must become faster, one slower, one neither. Other knobs have no such three on a CPU:
pin_memory and TF32 do nothing there, mixed precision depends on the processor's units for 16 bits, prefetch and
persistent_workers cannot do harm to training but by being taken out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.own_process import in_own_process
from benchmarks.planted_knobs import loading_cells, model_cells, optimizer_cells
from benchmarks.planted_knobs.planted import Planted

CELLS: tuple[Planted, ...] = (*loading_cells.CELLS, *model_cells.CELLS, *optimizer_cells.CELLS)


def measure() -> dict[str, object]:
    """The verdict about each cell, beside the truth."""
    rows = in_own_process(__name__, "judged")["rows"]
    return {"right": sum(row["verdict"] == row["truth"] for row in rows), "cells": len(rows), "rows": rows}


def judged(names: list[str] | None = None, pairs: int | None = None) -> dict[str, Any]:
    """An experiment with each cell, or with those whose knob is named."""
    asked = [planted for planted in CELLS if names is None or planted.knob in names]
    return {"rows": [_row(planted, pairs) for planted in asked]}


def namespace_of(planted: Planted) -> dict[str, Any]:
    """The live names of the notebook before the cell runs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(planted.before, names)
    return names


@contextmanager
def settings_kept() -> Iterator[None]:
    """What a cell has set for the whole process is as before at the end."""
    import torch

    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)


def _row(planted: Planted, pairs: int | None) -> dict[str, Any]:
    from gpulab import turning

    began = time.monotonic()
    with settings_kept():
        compared = turning.experiment(
            planted.cell,
            {planted.knob: planted.value},
            namespace=namespace_of(planted),
            name=planted.name,
            steps=planted.steps,
            pairs=pairs or planted.pairs,
            save=False,
            show=False,
        )
    turning.experiments.clear()
    found = compared.only
    row: dict[str, Any] = {
        "knob": planted.knob,
        "value": planted.value,
        "truth": planted.truth,
        "because": planted.because,
        "verdict": found.verdict,
        "ratio": found.ratio,
        "interval": found.interval,
        "noise_floor": found.noise_floor,
        "unit": found.unit,
        "us_per_step": [found.a.us_per_step, found.b.us_per_step],
        "pairs": found.pairs,
        "checks": [f"{check.name}={check.value}: {check.state}, {check.evidence}" for check in found.b.checks],
        "failure": found.b.failure,
        "seconds": time.monotonic() - began,
    }
    _tell(row)
    return row


def _tell(row: dict[str, Any]) -> None:
    ratio, interval = row["ratio"], row["interval"]
    figures = f"{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if ratio and interval else row["failure"] or "–"
    mark = "ok   " if row["verdict"] == row["truth"] else "WRONG"
    setting = f"{row['knob']}={row['value']}"
    print(f"  {mark} {setting:24} {row['truth']:25} {figures}  {row['seconds']:.0f} s", file=sys.stderr, flush=True)
