"""Planted truth: 24 training cells for the CPU, in which it is certain what a knob does, and the verdict about each.

For each of eight knobs one cell must become faster, one slower, one neither. Other knobs have no such three on a CPU:
pin_memory and TF32 do nothing there, mixed precision depends on the processor's units for 16 bits, prefetch and
persistent_workers cannot do harm to training but by being taken out.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.own_process import in_own_process
from benchmarks.planted_knobs import loading_cells, model_cells, optimizer_cells
from benchmarks.planted_knobs.planted import Planted

CELLS: tuple[Planted, ...] = (*loading_cells.CELLS, *model_cells.CELLS, *optimizer_cells.CELLS)


def holds(verdict: str, truth: str) -> bool:
    """Whether a verdict is true: of a cell without a difference also that nothing is decided, as noise may have it."""
    return verdict == truth or (verdict, truth) == ("undecided", "no measurable difference")


def measure() -> dict[str, object]:
    """The verdict about each cell, beside the truth, and what was predicted, beside what was measured."""
    rows = in_own_process(__name__, "judged")["rows"]
    return {
        "right": sum(holds(row["verdict"], row["truth"]) for row in rows),
        "cells": len(rows),
        "predictions": _predictions(rows),
        "rows": rows,
    }


def _predictions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of those that name a figure, not only a range or a sign."""
    errors = [row["error"] for row in rows if row["error"] is not None]
    held = [row["holds"] for row in rows if row["holds"] is not None]
    return {
        "count": len(errors),
        "median_error": statistics.median(errors) if errors else None,
        "interval_holds": [sum(held), len(held)],
    }


def judged(names: list[str] | None = None, pairs: int | None = None) -> dict[str, Any]:
    """An experiment with each cell, or with those whose knob is named. Earlier predictions have no say."""
    asked = [planted for planted in CELLS if names is None or planted.knob in names]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULAB_DIR"] = folder
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
    from gpulab.api import experiment

    began = time.monotonic()
    with settings_kept():
        compared = experiment.experiment(
            planted.cell,
            {planted.knob: planted.value},
            namespace=namespace_of(planted),
            name=planted.name,
            steps=planted.steps,
            pairs=pairs or planted.pairs,
            save=False,
            show=False,
        )
    experiment.experiments.clear()
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
        **_foretold(found),
        "seconds": time.monotonic() - began,
    }
    _tell(row)
    return row


def _foretold(found: Any) -> dict[str, Any]:
    made = found.b.prediction
    told: dict[str, Any] = {"predicted": None, "error": None, "holds": None}
    if made is None:
        return told
    told["predicted"] = {
        "ratio": None if made.ratio is None or made.only_sign else float(made.ratio),
        "interval": None if made.interval is None else [float(edge) for edge in made.interval],
        "refused": made.refused,
        "basis": made.basis,
    }
    if found.ratio is not None and made.interval is not None:
        told["holds"] = bool(made.interval[0] <= found.ratio <= made.interval[1])
        if told["predicted"]["ratio"] is not None:
            told["error"] = abs(float(made.ratio) / found.ratio - 1)
    return told


def _tell(row: dict[str, Any]) -> None:
    ratio, interval = row["ratio"], row["interval"]
    figures = f"{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if ratio and interval else row["failure"] or "–"
    mark = "ok   " if holds(row["verdict"], row["truth"]) else "WRONG"
    setting = f"{row['knob']}={row['value']}"
    print(
        f"  {mark} {setting:24} {row['truth']:25} {figures}  "
        f"predicted {(row['predicted'] or {}).get('ratio')} {row['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
