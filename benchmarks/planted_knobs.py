"""Knobs against planted truth: the verdict about each of 24 cells for the CPU in which it is certain what a knob does.

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.harness import Figure, in_own_process
from planted.catalogue import KNOBS, PlantedKnob
from planted.judge import verdict_holds


def measure() -> dict[str, object]:
    """The verdict about each cell, beside the truth, and what was predicted, beside what was measured."""
    rows = in_own_process(__name__, "judgement")["rows"]
    return {
        "right": sum(verdict_holds(row["verdict"], row["truth"]) for row in rows),
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


def judgement(names: list[str] | None = None, pairs: int | None = None) -> dict[str, Any]:
    """An experiment with each cell, or with those whose knob is named. Earlier predictions have no say."""
    cases = [planted for planted in KNOBS if names is None or planted.knob in names]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPULAB_DIR"] = folder
        return {"rows": [_row(planted, pairs) for planted in cases]}


@contextmanager
def settings_kept() -> Iterator[None]:
    """What a cell has set for the whole process is as before at the end."""
    import torch

    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        yield
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)


def _row(planted: PlantedKnob, pairs: int | None) -> dict[str, Any]:
    from gpulab.api import experiment

    began = time.monotonic()
    with settings_kept():
        compared = experiment.experiment(
            planted.text[1],
            {planted.knob: planted.value},
            namespace=planted.namespace(),
            name=planted.name,
            steps=planted.steps,
            pairs=pairs or planted.pairs,
            save=False,
            show=False,
        )
    experiment.experiments.clear()
    result = compared.only
    row: dict[str, Any] = {
        "knob": planted.knob,
        "value": planted.value,
        "truth": planted.truth,
        "because": planted.because,
        "verdict": result.verdict,
        "ratio": result.ratio,
        "interval": result.interval,
        "noise_floor": result.noise_floor,
        "unit": result.unit,
        "us_per_step": [result.a.us_per_step, result.b.us_per_step],
        "pairs": result.pairs,
        "checks": [f"{check.name}={check.value}: {check.state}, {check.evidence}" for check in result.b.checks],
        "failure": result.b.failure,
        **_foretold(result),
        "seconds": time.monotonic() - began,
    }
    _tell(row)
    return row


def _foretold(result: Any) -> dict[str, Any]:
    made = result.b.prediction
    told: dict[str, Any] = {"predicted": None, "error": None, "holds": None}
    if made is None:
        return told
    told["predicted"] = {
        "ratio": None if made.ratio is None or made.only_sign else float(made.ratio),
        "interval": None if made.interval is None else [float(edge) for edge in made.interval],
        "refused": made.refused,
        "basis": made.basis,
    }
    if result.ratio is not None and made.interval is not None:
        told["holds"] = bool(made.interval[0] <= result.ratio <= made.interval[1])
        if told["predicted"]["ratio"] is not None:
            told["error"] = abs(float(made.ratio) / result.ratio - 1)
    return told


def _tell(row: dict[str, Any]) -> None:
    ratio, interval = row["ratio"], row["interval"]
    figures = f"{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]" if ratio and interval else row["failure"] or "–"
    mark = "ok   " if verdict_holds(row["verdict"], row["truth"]) else "WRONG"
    setting = f"{row['knob']}={row['value']}"
    print(
        f"  {mark} {setting:24} {row['truth']:25} {figures}  "
        f"predicted {(row['predicted'] or {}).get('ratio')} {row['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many verdicts and predictions are right."""
    yield Figure.share("verdicts right", results["right"], results["cells"], "right")
    predictions = results["predictions"]
    held, of = predictions["interval_holds"]
    yield Figure(
        f"median error of {predictions['count']} predictions", predictions["median_error"], "%", target="error"
    )
    yield Figure.share("interval of a prediction holds", held, of, "interval")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    """Each verdict that is wrong."""
    for row in results["rows"]:
        if not verdict_holds(row["verdict"], row["truth"]):
            yield f"- {row['knob']}={row['value']}: {row['because']}. Must be {row['truth']}, said {row['verdict']}"
