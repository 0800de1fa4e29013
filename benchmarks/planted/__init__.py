"""Planted causes: training cells and traces whose bottleneck is known beforehand, and what gpulab says about them.

Each cell describes itself in the header of its own file (`planted.py` says what each field means). `tuned` are the
cells that the rules were built or mended with, `aside` those that no rule was tried on. Each cell runs in a process of
its own: once under `%%gpuprofile`, then in short runs in turn as written, cured, and with the knobs that the finding
advised.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.own_process import in_own_process
from benchmarks.planted import first_runs, judging, traces
from benchmarks.planted.catalogue import CELLS, cells_of
from benchmarks.planted.planted import Planted
from benchmarks.planted.results import unmeasured


def tuned() -> dict[str, object]:
    """The cells that the rules were built or mended with, and the traces."""
    return {**_measured(cells_of("tuned")), "traces": in_own_process(traces.__name__, "judged")["rows"]}


def aside() -> dict[str, object]:
    """The cells kept aside."""
    return _measured(cells_of("aside"))


def _measured(cells: Sequence[Planted]) -> dict[str, Any]:
    from gpulab.devices.machine import environment

    rows = [row_of(planted) for planted in cells]
    first_runs.record(rows, CELLS, environment().cpu)
    return {"totals": judging.totals(rows), "rows": rows}


def row_of(planted: Planted, *, diagnose: bool = True, cures: bool = True, store: str = "") -> dict[str, Any]:
    """All about one cell, in a process of its own. A cell that fails is told, and does not end the others.

    `store`: an absolute path of a folder in which the run is kept; empty for none.
    """
    began = time.monotonic()
    row = unmeasured(planted, skipped(planted))
    if not row["skipped"]:
        try:
            how = {"diagnose": diagnose, "cures": cures, "store": store}
            row |= in_own_process(f"{__name__}.one", "row", name=planted.name, **how)
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
