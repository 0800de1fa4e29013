"""Every wait as a user's stopwatch shows it: whole commands, whole cells, nothing left out, in one run with the peers.

Commands are processes from start to end, gpulab and its peers by turns; a cell is timed by the messages of its kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import synthetic_trace
from benchmarks.harness import RESULTS, ratio_with_interval
from benchmarks.kernel import kernel
from benchmarks.planted.catalogue import CELLS
from benchmarks.trace_reading import ARMS, LARGE, LARGEST, PEERS, TRACES

TURNS = 7
_MET = {True: "met", False: "missed"}
OPENING = """
import sys, time, gpulab
began = time.perf_counter()
gpulab.load(sys.argv[1])
print(time.perf_counter() - began)
"""
WINDOW = """
import time, torch, gpulab
%load_ext gpulab
torch.set_num_threads(1)
parameter = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([parameter], lr=0.1)
x = torch.ones(4)
"""
WINDOW_CELL = """%%gpuprofile --steps 16 --trace-steps 5
for step in range(16):
    for _ in range(4000):
        x.add_(1)
    last = time.time()
    optimizer.step()
"""
KEY_AVERAGES = """
from torch.profiler import profile
with profile() as prof:
    for step in range(5):
        for _ in range(4000):
            x.add_(1)
        optimizer.step()
began = time.perf_counter()
prof.key_averages()
key_averages_s = time.perf_counter() - began
"""
FAR_CAUSES = ("cpu_preprocessing", "storage_bound", "slow_collate")  # which two workers take out by half or more
EACH = 3
NEAR = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
def busy(rounds):
    total = 0
    for i in range(rounds):
        total += i
    return total
"""
NEAR_CELL = """
rounds = {rounds}
for step in range(100_000):
    busy(rounds)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def measure() -> dict[str, object]:
    """Seconds of each wait, with what they are compared to."""
    return {
        "commands": commands(),
        "large": large(),
        "first_screen": first_screen(),
        "comparisons": comparisons(),
    }


# commands


def commands() -> dict[str, object]:
    """`gpulab report` beside its peers on the largest real trace, and what takes no trace."""
    gpulab = [str(Path(sys.executable).with_name("gpulab"))]
    with tempfile.TemporaryDirectory() as folder:
        trace = shutil.copy(TRACES / LARGEST, folder)
        stored = _stored_run(Path(folder))
        arms: dict[str, tuple[list[str], bool]] = {  # a command, and whether the cache is emptied before it
            "report, first time": ([*gpulab, "report", trace, "--json"], True),
            "report, again": ([*gpulab, "report", trace, "--json"], False),
            "report of a stored run": ([*gpulab, "report", stored, "--json"], False),
            "help": ([*gpulab, "--help"], False),
            "runs": ([*gpulab, "runs"], False),
            "json.load": ([sys.executable, "-c", _program("json.load"), trace], False),
        }
        if PEERS.exists():
            arms["HTA"] = ([str(PEERS), "-c", _program("HTA"), trace], False)
        opening = {
            "opening again": [sys.executable, "-c", OPENING, trace],
            "opening a stored run": [sys.executable, "-c", OPENING, stored],
        }
        environment = _environment(Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in (*arms, *opening)}
        for command, _ in arms.values():  # once unmeasured: bytecode, the disk's cache
            _timed(command, environment)
        for turn in range(TURNS):
            names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
            for name in names:
                command, emptied = arms[name]
                if emptied:
                    shutil.rmtree(Path(folder, "cache"), ignore_errors=True)
                seconds[name].append(_timed(command, environment))
            _timed(arms["report, first time"][0], environment)
            for name, command in opening.items():
                seconds[name].append(float(_output(command, environment)))
    first = seconds["report, first time"]
    return {
        "seconds": {name: statistics.median(rows) for name, rows in seconds.items()},
        "over_report": {
            peer: ratio_with_interval([a / b for a, b in zip(seconds[peer], first, strict=True)])
            for peer in ("json.load", "HTA")
            if peer in seconds
        },
    }


def _program(tool: str) -> str:
    """A peer from its start to its figures."""
    return "\n".join(("import json, sys", *ARMS[tool]))


def _stored_run(folder: Path) -> str:
    """A run of 100,000 events, as the store writes it."""
    code = (
        "import gpulab, torch\n"
        "x = torch.ones(4)\n"
        "with gpulab.profile('stored', show=False, steps=16, trace_steps=5) as p:\n"
        "    while True:\n"
        "        for _ in range(4000): x.add_(1)\n"
        "        gpulab.step()\n"
        "print(gpulab.runs.store.find('latest'))"
    )
    return _output([sys.executable, "-c", code], _environment(folder)).strip().splitlines()[-1]


def _environment(folder: Path) -> dict[str, str]:
    own = {"GPULAB_DIR": str(folder), "GPULAB_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | own


def _timed(command: Sequence[str], environment: Mapping[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - began


def _output(command: Sequence[str], environment: Mapping[str, str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


# 5 million events


def large() -> dict[str, object]:
    """The same command on a made trace of five million events: seconds, and the most memory of all its processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "made.json.gz")
        synthetic_trace.write(file, LARGE)
        command = [str(Path(sys.executable).with_name("gpulab")), "report", str(file), "--json"]
        rows = [_watched(command, _environment(Path(folder))) for _ in range(2)]  # the second one from the cache
        again = float(_output([sys.executable, "-c", OPENING, str(file)], _environment(Path(folder))))
        size = file.stat().st_size
    names = ("first_time", "again")
    return {
        "events": LARGE,
        "gzip_bytes": size,
        "opening_again_s": again,
        **{name: {"seconds": s, "peak_bytes": peak} for name, (s, peak) in zip(names, rows, strict=True)},
    }


def _watched(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, int]:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(environment))
    peak, over = 0, threading.Event()

    def look() -> None:
        nonlocal peak
        watched = psutil.Process(process.pid)
        while not over.wait(0.05):
            try:
                peak = max(peak, sum(p.memory_info().rss for p in (watched, *watched.children(recursive=True))))
            except psutil.Error:
                continue

    thread = threading.Thread(target=look)
    thread.start()
    status = process.wait()
    seconds = time.perf_counter() - began
    over.set()
    thread.join()
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}")
    return seconds, peak


# cells


def first_screen() -> dict[str, object]:
    """From the last step of a cell to the message with its report, and `key_averages()` of a window as large."""
    rows, peer = [], []
    with kernel() as session:
        session.run(WINDOW)
        for _ in range(TURNS):
            shown = session.shown_at(WINDOW_CELL)
            rows.append(shown - session.value("last"))
            session.run(KEY_AVERAGES)
            peer.append(session.value("key_averages_s"))
        events = session.value("gpulab.runs[-1].observer.event_count")
    return {
        "events": events,
        "seconds": statistics.median(rows),
        "key_averages_s": statistics.median(peer),
        "over_gpulab": ratio_with_interval([p / own for p, own in zip(peer, rows, strict=True)]),
    }


def comparisons() -> list[dict[str, object]]:
    """Whole cells with `--ab`: settings far apart, near each other, and equal."""
    return [*_far(), _near("5 % apart", 21_000), _near("equal", 20_001)]


def _far() -> list[dict[str, object]]:
    """Planted cells that no rule was built with, each against itself with two workers."""
    rows = []
    for cause in FAR_CAUSES:
        cells = [c for c in CELLS if c.causes[:1] == (cause,) and c.framework == "torch" and not (c.looked_at or c.gpu)]
        cells = [c for c in cells if "num_workers" not in "".join(c.text)]  # two workers would be no other setting
        for cell in sorted(cells, key=lambda c: c.name)[:EACH]:
            before, training = cell.text
            rows.append(_ab(f"far apart: {cell.name}", before, training, "workers=2"))
    return rows


def _near(name: str, rounds: int) -> dict[str, object]:
    """A step that a loop in Python takes most of, of so many rounds in place of 20 thousand: the same is refused."""
    return _ab(name, NEAR, NEAR_CELL.format(rounds=20_000), f"rounds={rounds}")


def _ab(name: str, before: str, cell: str, setting: str) -> dict[str, object]:
    with kernel() as session:
        session.run(f"{before}\nimport gpulab\n%load_ext gpulab")
        began = time.perf_counter()
        session.run(f"%%gpuprofile --ab {setting}\n{cell}")
        seconds = time.perf_counter() - began
        verdict, ratio, interval = (
            session.value(f"gpulab.experiments[-1].only.{k}") for k in ("verdict", "ratio", "interval")
        )
    return {"name": name, "seconds": seconds, "verdict": verdict, "ratio": ratio, "interval": interval}


# for the table


def section(kept: dict[str, Any]) -> list[str]:
    """Each wait, its aim, and whether it was met."""
    commands, large, screen, compared = (kept[k] for k in ("commands", "large", "first_screen", "comparisons"))
    seconds, over = commands["seconds"], commands["over_report"]
    far = [row["seconds"] for row in compared if row["name"].startswith("far apart")]
    near, equal = (next(row for row in compared if row["name"] == name) for name in ("5 % apart", "equal"))
    peak_mib = large["first_time"]["peak_bytes"] / 2**20
    report, events = "`gpulab report TRACE --json`", f"{large['events']:,} events"
    rows = [
        _at_most(f"{report}, 104,158 spans of an H100", seconds["report, first time"], 0.5),
        _at_least("… times faster than `json.load`", over.get("json.load"), 3),
        _at_least("… times faster than HTA", over.get("HTA"), 10),
        _at_most("opening that trace again, `gpulab.load`", seconds["opening again"], 0.25),
        _at_most("opening a stored run, `gpulab.load`", seconds["opening a stored run"], 0.25),
        _at_most(f"{report} again, the whole command", seconds["report, again"]),
        _at_most("`gpulab report` of a stored run, the whole command", seconds["report of a stored run"]),
        _at_most(f"{report}, {events}, two cores", large["first_time"]["seconds"], 8.0),
        (f"… the most memory of its processes | {peak_mib:,.0f} MiB | ≤ 500 MiB | {_MET[peak_mib <= 500]}"),
        _at_most(f"opening {events} again, `gpulab.load`", large["opening_again_s"], 0.25),
        _at_most(f"{report} of {events} again, the whole command", large["again"]["seconds"]),
        _at_most("`gpulab --help`", seconds["help"], 0.15),
        _at_most("`gpulab runs`", seconds["runs"], 0.15),
        _at_most(f"last step to first screen, {screen['events']:,} events", screen["seconds"], 0.35),
        _at_least("… times faster than `key_averages()`", screen["over_gpulab"], 15),
        _at_most(f"`--ab workers=2`, {len(far)} cells, the median", statistics.median(far), 15.0),
        _at_most("… the longest", max(far), 15.0),
        _at_most(f"`--ab`, 5 % apart: {near['verdict']}", near["seconds"], 40.0),
        _at_most(f"`--ab`, equal settings: {equal['verdict']}", equal["seconds"]),
        *_of_others(),
    ]
    return [
        "## Every wait, by a user's stopwatch",
        "",
        "Whole commands, from start to end, and whole cells; gpulab and its peers by turns; medians.",
        "",
        "| wait | measured | aim | |",
        "|---|---|---|---|",
        *(f"| {row} |" for row in rows),
        "",
        "| `--ab` | seconds | verdict | ratio |",
        "|---|---|---|---|",
        *(f"| {r['name']} | {r['seconds']:.0f} | {r['verdict']} | {_interval(r)} |" for r in compared),
    ]


def _of_others() -> list[str]:
    """What other benchmarks measure and somebody waits for, too; their own tables say how."""
    rows = []
    climb, step, memory, tests = (_kept(name) for name in ("climbing", "overhead", "memory", "make_test"))
    if climb is not None:
        rows.append(_at_most("`%gpulab climb` of the demo's cell, as it ends by itself", climb["seconds"], 45.0))
    if step is not None:
        added = step["step_ratio_to_bare"]["1 ms"]["gpulab"]["fastest_tenth"]["ratio"] - 1
        bare_ms = step["step_ratio_to_bare"]["1 ms"]["bare_step_ms"]
        rows.append(f"a step of {bare_ms:.2f} ms under the magic | +{added:.1%} | ≤ +2% | {_MET[added <= 0.02]}")
    if memory is not None:
        mib = memory["gpulab"]["mib"]
        grown = (mib[-1] - mib[1]) / (len(mib) - 2)  # the first reading is before the run is warm
        said = f"{grown:.1f} MiB"
        rows.append(f"memory for each further 100,000 steps, of a million | {said} | flat | {_MET[grown < 0.1]}")
    if tests is not None:  # by pytest's own clock, of a whole run
        minutes = (tests["unit_s"] + tests["browser_s"]) / 60
        rows.append(f"the tests of `make test`, two cores | {minutes:.0f} min | ≤ 8 min | {_MET[minutes <= 8]}")
    return rows


def _kept(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _interval(row: Mapping[str, Any]) -> str:
    if row["interval"] is None:
        return "–"
    low, high = row["interval"]
    return f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def _at_most(name: str, seconds: float, most: float | None = None) -> str:
    figure = f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{name} | {figure} | | " if most is None else f"{name} | {figure} | ≤ {most:g} s | {_MET[seconds <= most]}"


def _at_least(name: str, over: Mapping[str, Any] | None, least: float) -> str:
    if over is None:
        return f"{name} | not measured | ≥ {least:g} | "
    low, high = over["interval"]
    return f"{name} | {over['ratio']:.1f} [{low:.1f}, {high:.1f}] | ≥ {least:g} | {_MET[over['ratio'] >= least]}"
