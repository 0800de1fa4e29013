"""Whether comparisons are right where the truth is certain: nothing changed, or a known slowdown.

`same`: arm B sets a variable that the cell reads and that changes nothing; in the same minute the same cell runs twice
more, one run after the other, each with as many unprofiled steps as one arm had in its blocks. Does the 95 % interval
hold 1, and is "faster" or "slower" said? `slowdown`: arm B keeps the processor busy for 5 % of a step of about 10 ms,
in experiments of at most a minute; the interval is held against the share that this time is of the steps which that
experiment measured as written. `busy`: nothing changed, and ten times the work, while other processes compute.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import Figure, in_own_process

SAME = 128  # experiments
SLOWDOWNS = 30
BUSY, BUSY_SAME, BUSY_TENFOLD = 4, 64, 40  # processes that only compute, and experiments beside them
PAIRS, BLOCK_STEPS = 10, 10
TIMES = 10
STEP_MS, SLOWDOWN = 10.0, 0.05
STEPS_TIMED = 60

IMPORTS = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
run_name, passes, extra_us = "first", 1, 0.0
"""
CELL = """
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        for _ in range(passes):
            loss = F.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        last = run_name
"""
SLOWER_CELL = """
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        until = time.perf_counter() + extra_us / 1e6
        while time.perf_counter() < until:
            pass
"""
IN_MEMORY = """
loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.randn(8192, 1)), batch_size=32, shuffle=True)
"""
WAITING = """
from planted.datasets import Stored
loader = DataLoader(Stored(4096, wait_s=0.001), batch_size=8, shuffle=True{workers})
"""
WIDE = """
model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
DEEP = """
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(50)), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
SLOWER = """
loader = DataLoader(TensorDataset(torch.randn(16384, 16), torch.randn(16384, 1)), batch_size=64, shuffle=True)
model = nn.Sequential(
    nn.Linear(16, 256),
    *(layer for _ in range({depth}) for layer in (nn.ReLU(), nn.Linear(256, 256))),
    nn.Linear(256, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""
KINDS = {
    "matrix products": IMPORTS + IN_MEMORY + WIDE,
    "many small operations": IMPORTS + IN_MEMORY + DEEP,
    "waiting for data": IMPORTS + WAITING.format(workers="") + WIDE,
    "two workers": IMPORTS + WAITING.format(workers=", num_workers=2") + WIDE,
}
COMPUTING = ("matrix products", "many small operations")
METHODS = ("interleaved", "sequential")


# -- nothing was changed -----------------------------------------------------------------------------------------------


def same() -> dict[str, object]:
    """Coverage and false verdicts of both methods, over all kinds of cells and for each."""
    rows = in_own_process(__name__, "experiments_same", count=SAME)["rows"]
    return {
        "experiments": len(rows),
        "pairs": PAIRS,
        "all": _summary(rows),
        "kinds": {kind: _summary([row for row in rows if row["kind"] == kind]) for kind in KINDS},
        "rows": rows,
    }


def experiments_same(count: int, pairs: int = PAIRS) -> dict[str, Any]:
    """The kinds in turn. Which of the two methods comes first alternates."""
    rows = []
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        began = time.monotonic()
        methods = {"interleaved": _interleaved, "sequential": _sequential}
        order = METHODS if (i // len(KINDS)) % 2 else METHODS[::-1]
        row: dict[str, Any] = {"kind": kind, **{method: methods[method](kind, pairs) for method in order}}
        row["seconds"] = time.monotonic() - began
        rows.append(row)
        _tell(i, count, f"{kind}: " + "; ".join(f"{method} {_words(row[method])}" for method in METHODS))
    return {"rows": rows}


def _interleaved(kind: str, pairs: int) -> dict[str, Any]:
    return _compared(CELL, KINDS[kind], {"run_name": "second"}, steps=BLOCK_STEPS, pairs=pairs)


def _sequential(kind: str, pairs: int) -> dict[str, Any]:
    from gpulab.tuning.compare.blocks import compare_runs

    names = _notebook(KINDS[kind])
    before, after = (_plain_run(CELL, names, BLOCK_STEPS * pairs) for _ in range(2))
    return _judgement(compare_runs([before, after]))


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {method: _of([row[method] for row in rows]) for method in METHODS}


def _of(result: Sequence[dict[str, Any]]) -> dict[str, float]:
    widths = sorted(f["interval"][1] - f["interval"][0] for f in result if f["interval"] is not None)
    return {
        "experiments": len(result),
        "holds_1": sum(f["holds_1"] for f in result),
        "faster_or_slower": sum(f["verdict"] in ("faster", "slower") for f in result),
        "median_width": widths[len(widths) // 2] if widths else float("nan"),
        "worst_ratio": max((f["ratio"] for f in result if f["ratio"]), key=lambda r: abs(r - 1), default=float("nan")),
    }


# -- a slowdown of 5 % -------------------------------------------------------------------------------------------------


def slowdown() -> dict[str, object]:
    """How many of the experiments said "slower", and how long they took."""
    result = in_own_process(__name__, "experiments_slowdown", count=SLOWDOWNS)
    rows = result["rows"]
    return {
        "experiments": len(rows),
        "found": sum(row["verdict"] == "slower" for row in rows),
        "step_ms": result["step_ms"],
        "slowdown": SLOWDOWN,
        "median_ratio": statistics.median(row["ratio"] for row in rows),
        "extra_us": result["extra_us"],
        "median_planted": statistics.median(_planted(row, result["extra_us"]) for row in rows),
        "interval_holds_it": sum(_holds(row, result["extra_us"]) for row in rows),
        "longest_s": max(row["seconds"] for row in rows),
        "rows": rows,
    }


def experiments_slowdown(count: int) -> dict[str, Any]:
    """The same experiment again and again, each in a new notebook. The step is measured first, in a plain run."""
    depth = round(8 * STEP_MS / _step_ms(8))
    step_ms = _step_ms(depth)
    extra_us = round(1e3 * step_ms * SLOWDOWN, 1)
    print(f"  {depth} layers, {step_ms:.2f} ms per step, {extra_us} µs more", file=sys.stderr, flush=True)
    rows = []
    for i in range(count):
        rows.append(_compared(SLOWER_CELL, IMPORTS + SLOWER.format(depth=depth), {"extra_us": extra_us}))
        _tell(i, count, f"{_words(rows[-1])}, {rows[-1]['pairs']} pairs, {rows[-1]['seconds']:.0f} s")
    return {"step_ms": step_ms, "extra_us": extra_us, "depth": depth, "rows": rows}


def _step_ms(depth: int) -> float:
    """The median step of the baseline, in a run without a trace."""
    run = _plain_run(SLOWER_CELL, _notebook(IMPORTS + SLOWER.format(depth=depth)), STEPS_TIMED)
    return float(statistics.median(run.steps.wall_ns[5:])) / 1e6


def _planted(row: dict[str, Any], extra_us: float) -> float:
    """The ratio that was planted, by the steps as written of this experiment."""
    return 1 + extra_us / float(row["us_per_step"][0])


def _holds(row: dict[str, Any], extra_us: float) -> bool:
    low, high = row["interval"]
    return bool(low <= _planted(row, extra_us) <= high)


# -- beside other processes --------------------------------------------------------------------------------------------


def busy(processes: int = BUSY, same: int = BUSY_SAME, tenfold: int = BUSY_TENFOLD) -> dict[str, object]:
    """Coverage and false verdicts where nothing changed, and how often ten times the work is found."""
    with others(processes):
        rows = in_own_process(__name__, "experiments_busy", same=same, tenfold=tenfold)["rows"]
    of_same = [row for row in rows if row["times"] == 1]
    of_ten = [row for row in rows if row["times"] == TIMES]
    return {
        "busy_processes": processes,
        "load_average": [min(row["load"] for row in rows), max(row["load"] for row in rows)],
        "pairs": PAIRS,
        "same": {"experiments": len(of_same), "holds_1": sum(row["holds_1"] for row in of_same), **_said(of_same)},
        "tenfold": {"experiments": len(of_ten), **_said(of_ten)},
        "rows": rows,
    }


def experiments_busy(same: int, tenfold: int) -> dict[str, Any]:
    """The kinds of cells in turn, each in a new notebook; tenfold work where the model is most of the step."""
    plan = [(list(KINDS)[i % len(KINDS)], 1) for i in range(same)]
    plan += [(COMPUTING[i % len(COMPUTING)], TIMES) for i in range(tenfold)]
    rows: list[dict[str, Any]] = []
    for i, (kind, times) in enumerate(plan):
        change: dict[str, object] = {"run_name": "second"} if times == 1 else {"passes": times}
        result = _compared(CELL, KINDS[kind], change, steps=BLOCK_STEPS, pairs=PAIRS)
        rows.append({"kind": kind, "times": times, **result, "load": os.getloadavg()[0]})
        _tell(i, len(plan), f"{kind}, {times} times: {_words(result)}, load {rows[-1]['load']:.1f}")
    return {"rows": rows}


@contextlib.contextmanager
def others(count: int) -> Iterator[None]:
    """So many processes compute meanwhile."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _said(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {said: sum(row["verdict"] == said for row in rows) for said in ("faster", "slower", "undecided")}


# -- one experiment ----------------------------------------------------------------------------------------------------


def _compared(cell: str, before: str, change: Mapping[str, object], **options: Any) -> dict[str, Any]:
    from gpulab.api import experiment

    names, began = _notebook(before), time.monotonic()
    compared = experiment.experiment(cell, dict(change), namespace=names, save=False, show=False, **options)
    seconds = time.monotonic() - began
    experiment.experiments.clear()
    result = compared.only
    sides = [result.a.us_per_step, result.b.us_per_step]
    return {**_judgement(result), "pairs": result.pairs, "us_per_step": sides, "seconds": seconds}


def _plain_run(cell: str, names: dict[str, Any], steps: int) -> Any:
    """As a user measures a cell once. The trace is left out: all steps but the warm-up count."""
    import gpulab

    with gpulab.profile(steps=steps + 5, warmup=5, trace=False, live=False, save=False, show=False, code=cell) as p:
        exec(compile(cell, "<cell>", "exec"), names)
    return p.run


def _notebook(before: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(before, names)
    return names


def _judgement(result: Any) -> dict[str, Any]:
    interval = result.interval
    return {
        "ratio": result.ratio,
        "interval": interval,
        "noise_floor": result.noise_floor,
        "verdict": result.verdict,
        "holds_1": interval is not None and interval[0] <= 1 <= interval[1],
        "us_per_step": result.a.us_per_step,
    }


def _tell(done: int, count: int, words: str) -> None:
    print(f"  {done + 1} of {count} {words}", file=sys.stderr, flush=True)


def _words(row: Mapping[str, Any]) -> str:
    shown = "[{:.3f}, {:.3f}]".format(*row["interval"]) if row["interval"] else "no interval"
    return f"{row['ratio']:.3f} {shown} {row['verdict']}"


# -- for people --------------------------------------------------------------------------------------------------------


def figures_same(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Of both methods, over all cells and for each kind."""
    for kind, result in (("all cells", results["all"]), *results["kinds"].items()):
        for method, title in (("interleaved", "blocks in turn"), ("sequential", "before, after")):
            row, aimed = result[method], kind == "all cells" and method == "interleaved"
            yield Figure.share(
                f"{kind}, {title}: interval holds 1", row["holds_1"], row["experiments"], "holds" * aimed
            )
            said = row["faster_or_slower"]
            yield Figure.share(f"{kind}, {title}: “faster” or “slower”", said, row["experiments"], "false" * aimed)


def figures_slowdown(results: Mapping[str, Any]) -> Iterator[Figure]:
    """How often it was said, and how far off the ratio is."""
    count = results["experiments"]
    yield Figure.share(
        f"“slower”, {results['slowdown']:.0%} of a step of {results['step_ms']:.1f} ms",
        results["found"],
        count,
        "found",
    )
    yield Figure("median ratio", results["median_ratio"], "+%")
    yield Figure("median planted", results["median_planted"], "+%")
    yield Figure.share("interval holds it", results["interval_holds_it"], count)
    yield Figure("longest experiment", results["longest_s"], "s", target="longest")


def figures_busy(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Where nothing changed, and where ten times the work was done."""
    same, ten = results["same"], results["tenfold"]
    count, (low, high) = same["experiments"], results["load_average"]
    about = f"load average, {results['busy_processes']} processes of the benchmark among it"
    yield Figure(about, high, words=f"{low:.1f} to {high:.1f}")
    yield Figure.share("nothing changed: interval holds 1", same["holds_1"], count, "holds")
    yield Figure.share("nothing changed: “faster” or “slower”", same["faster"] + same["slower"], count, "false")
    yield Figure.share("nothing changed: “undecided”", same["undecided"], count)
    yield Figure.share("ten times the work: “slower”", ten["slower"], ten["experiments"], "found")
