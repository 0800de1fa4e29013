"""Planted causes: training cells and traces whose bottleneck is known beforehand, and what gpulab says about them.

`tuned` and `aside`: a third of the cells is kept aside (`kept_aside.py`), and no rule was tried on them while the
rules were built. Each cell runs in a process of its own: once under `%%gpuprofile`, then in short runs in turn as
written, cured, and with the knobs that the finding advised.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.own_process import in_own_process
from benchmarks.planted import judging, traces
from benchmarks.planted.kept_aside import FIRST_RUNS, KEPT_ASIDE
from benchmarks.planted.listed import CELLS
from benchmarks.planted.planted import Planted


def tuned() -> dict[str, object]:
    """The cells that the rules were built with, and the traces."""
    found = _measured([p for p in CELLS if p.name not in KEPT_ASIDE])
    return {**found, "traces": in_own_process(traces.__name__, "judged")["rows"]}


def aside() -> dict[str, object]:
    """The cells kept aside, and what each set of them gave when it was run first."""
    found = _measured([p for p in CELLS if p.name in KEPT_ASIDE])
    return {**found, "first_runs": [run._asdict() for run in FIRST_RUNS]}


def _measured(cells: Sequence[Planted]) -> dict[str, Any]:
    rows = [row_of(planted) for planted in cells]
    return {"totals": judging.totals(rows), "rows": rows}


def row_of(planted: Planted, *, diagnose: bool = True, cures: bool = True) -> dict[str, Any]:
    """All about one cell, in a process of its own. A cell that fails is told, and does not end the others."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "name": planted.name,
        "framework": planted.framework,
        "because": planted.because,
        "causes": list(planted.causes),
        "also": list(planted.also),
        "skipped": skipped(planted),
        "failed": "",
    }
    if not row["skipped"]:
        try:
            row |= in_own_process(f"{__name__}.one", "row", name=planted.name, diagnose=diagnose, cures=cures)
        except Exception as e:
            row["failed"] = f"{type(e).__name__}: {e}"
    row["seconds"] = time.monotonic() - began
    _tell(row)
    return row


def skipped(planted: Planted) -> str:
    """Why it cannot run here; empty where it can."""
    from importlib.util import find_spec

    import torch

    if planted.gpu and not torch.cuda.is_available():
        return "needs a GPU"
    missing = [name for name in planted.needs if find_spec(name) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def named(name: str) -> Planted:
    """The cell of that name. Raises KeyError."""
    return {planted.name: planted for planted in CELLS}[name]


def _tell(row: dict[str, Any]) -> None:
    """One line on stderr."""
    if row["skipped"] or row["failed"]:
        words = f"skipped: {row['skipped']}" if row["skipped"] else f"FAILED: {row['failed']}"
        print(f"  {row['name']:34} {words}", file=sys.stderr, flush=True)
        return
    mark = "" if "right" not in row else "ok   " if row["right"] else "WRONG"
    arms = (row["measured"] or {}).get("arms", {})
    gains = "  ".join(f"{label} {a['ratio']:.2f} [{a['interval'][0]:.2f}, {a['interval'][1]:.2f}]"
                      for label, a in arms.items())  # fmt: skip
    predicted = (row.get("predicted") or {}).get("ratio")
    said = f" predicted {predicted:.2f}" if predicted is not None else ""
    print(
        f"  {mark} {row['name']:34} {'+'.join(row['causes']) or 'healthy':24} -> {row.get('headline', ''):20}"
        f"{said} {gains} {'UNTRUE: ' + row['untrue'] if row['untrue'] else ''} {row['seconds']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
