"""`python -m benchmarks memory_owners`: are planted owners and leaks named right, and is a ledger's sum exact?

The inputs (memory_planted.py, memory_models.py) were written by somebody who had not read gpulab's code. Each runs in a
process of its own, in a real IPython shell. The oracle of a sum is the C++ allocator's own count of live bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import Figure, in_own_process
from benchmarks.memory_models import MODELS
from benchmarks.memory_planted import CONTROLS, LEAKS, OWNERS, Leak, Owner

RUNS = 6  # of a leaking cell: it is told after the third
MARK = "ledger"


def measure() -> dict[str, Any]:
    """All planted owners, leaks and controls, and the ledgers of all models."""
    owners = {owner.name: _owner(owner) for owner in OWNERS}
    leaks = {leak.name: _leak(leak) for leak in (*LEAKS, *CONTROLS)}
    ledgers = {name: in_own_process(__name__, "ledger_of", code=code) for name, code in MODELS.items()}
    return {"owners": owners, "leaks": leaks, "ledgers": ledgers}


def _owner(planted: Owner) -> dict[str, Any]:
    told = in_own_process(__name__, "largest_owner", cells=list(planted.cells))
    return {**told, "right": is_right(told["name"], planted.owner)}


def _leak(planted: Leak) -> dict[str, Any]:
    told = in_own_process(__name__, "told_leaks", setup=list(planted.setup), cell=planted.cell)
    named = [name for name in told["names"] if name]
    is_leak = planted.per_run_bytes > 0
    right = not named if not is_leak else bool(named) and is_right(named[0], planted.owner)
    return {**told, "right": right, "first": next((i + 1 for i, name in enumerate(told["names"]) if name), None)}


def is_right(name: str, accepted: tuple[str, ...]) -> bool:
    """Whether the name told contains one of the accepted spellings."""
    return any(each in name for each in accepted)


# -- in a process of its own -------------------------------------------------------------------------------------------


def _shell() -> Any:
    os.environ["GPULAB_DIR"] = tempfile.mkdtemp()
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_cell("%load_ext gpulab")
    return shell


def largest_owner(cells: list[str]) -> dict[str, Any]:
    """Run the cells as a notebook does; returns the largest owner that `%gpulab memory` names."""
    shell = _shell()
    shell.execution_count = 1
    for cell in cells:
        shell.run_cell(cell, store_history=True)
    from gpulab.api.memory import memory

    result = memory().result
    rows = sorted((row for rows in result.owners.values() for row in rows), key=lambda row: -row.bytes)
    return {
        "name": rows[0].owner if rows else "",
        "bytes": rows[0].bytes if rows else 0,
        "others": list(rows[0].others),
    }


def told_leaks(setup: list[str], cell: str) -> dict[str, Any]:
    """Run the cell again and again under `%%gpuprofile`; returns what each report says of a re-run leak."""
    shell = _shell()
    for each in setup:
        shell.run_cell(each, store_history=True)
    import gpulab

    names, each_bytes = [], []
    for _ in range(RUNS):
        shell.run_cell(f"%%gpuprofile --no-live --no-trace --no-save\n{cell}", store_history=True)
        account = gpulab.runs[-1].memory_account
        rerun = account.rerun if account is not None else None
        names.append(rerun.owner if rerun is not None else "")
        each_bytes.append(rerun.bytes_each if rerun is not None else 0)
    return {"names": names, "bytes_each": each_bytes}


def ledger_of(code: str) -> dict[str, Any]:
    """Profile a training cell; beside the sum of each ledger stands what torch's C++ allocator had handed out then."""
    shell = _shell()
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    import gpulab
    from gpulab.capture import memory_reader
    from gpulab.memory import storages

    sums: list[int] = []
    original = storages.live

    def marked() -> Any:
        with record_function(MARK):
            result = original()
        sums.append(sum(result.bytes.values()))
        return result

    before = sum(original().bytes.values())
    vars(memory_reader)["live"] = marked
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        torch.empty(1)
        shell.run_cell(f"%%gpuprofile --no-live --no-trace --no-save\n{code}")
    vars(memory_reader)["live"] = original
    account = gpulab.runs[-1].memory_account
    ledgers = [] if account is None else account.ledgers
    return {
        "sums": [count - before for count in sums[: len(ledgers)]],
        "allocated": _allocated_at_marks(trace)[: len(ledgers)],
        "named_bytes": sum(h.bytes for ledger in ledgers for h in ledger.holdings if h.kind != "unnamed"),
        "ledger_bytes": sum(ledger.bytes for ledger in ledgers),
    }


def _allocated_at_marks(trace: Any) -> list[int]:
    """The allocator's total at the beginning of each mark."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    marks = sorted(e["ts"] for e in events if e.get("name") == MARK and e.get("ph") == "X")
    totals = sorted(
        (e["ts"], e["args"]["Total Allocated"])
        for e in events
        if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
    )
    times = [t for t, _ in totals]
    return [totals[bisect_right(times, mark) - 1][1] for mark in marks]


# -- the table ---------------------------------------------------------------------------------------------------------


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How many owners and leaks are named right, and how many ledgers are exact."""
    owners, ledgers = results["owners"].values(), results["ledgers"].values()
    leaks = [results["leaks"][leak.name] for leak in LEAKS]
    controls = [results["leaks"][control.name] for control in CONTROLS]
    yield Figure.share("planted owners that are named right", sum(o["right"] for o in owners), len(owners), "owners")
    yield Figure.share("leaks over re-runs that are named right", sum(o["right"] for o in leaks), len(leaks), "leaks")
    yield Figure.share("cells that keep nothing and are told to", sum(not o["right"] for o in controls), len(controls))
    exact = sum(bool(one["sums"]) and one["sums"] == one["allocated"] for one in ledgers)
    yield Figure.share("models whose ledgers equal the allocator's bytes", exact, len(ledgers), "exact")
    named = sum(one["named_bytes"] for one in ledgers) / sum(one["ledger_bytes"] for one in ledgers)
    yield Figure("share of the ledgers' bytes that has an owner", named, "%")


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
