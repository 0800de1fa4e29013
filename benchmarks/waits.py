"""Every wait as a user's stopwatch shows it: whole commands, whole cells, nothing left out, in one run with the peers.

Commands are processes from start to end, gpulab and its peers by turns; a cell is timed by the messages of its kernel.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import synthetic_trace
from benchmarks.harness import Figure, ratio_with_interval
from benchmarks.kernel import kernel
from planted.catalogue import CELLS

PEERS = Path(os.environ.get("PEERS", ".venv-peers/bin/python"))  # see peers-requirements.txt; without it no HTA
TRACES = Path(os.environ.get("GPULAB_TRACES", "../shared/traces"))
LARGEST = "h100_owlv2_starved.pt.trace.json.gz"
LARGE = 5_000_000  # events
TURNS = 7
PROGRAMS = {  # of the peers, from their start to their figures
    "json.load": """
import gzip, json, sys
json.load(gzip.open(sys.argv[1]))
""",
    "HTA": """
import logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir='')
t.get_temporal_breakdown(visualize=False)
t.get_gpu_kernel_breakdown(visualize=False)
t.get_idle_time_breakdown(visualize=False)
""",
}
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
            "json.load": ([sys.executable, "-c", PROGRAMS["json.load"], trace], False),
        }
        if PEERS.exists():
            arms["HTA"] = ([str(PEERS), "-c", PROGRAMS["HTA"], trace], False)
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
        rows = [_measure(command, _environment(Path(folder))) for _ in range(2)]  # the second one from the cache
        again = float(_output([sys.executable, "-c", OPENING, str(file)], _environment(Path(folder))))
        size = file.stat().st_size
    names = ("first_time", "again")
    return {
        "events": LARGE,
        "gzip_bytes": size,
        "opening_again_s": again,
        **{name: {"seconds": s, "peak_bytes": peak} for name, (s, peak) in zip(names, rows, strict=True)},
    }


def _measure(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, int]:
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=dict(environment))
    peak, over = 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        child = psutil.Process(process.pid)
        while not over.wait(0.05):
            try:
                peak = max(peak, sum(p.memory_info().rss for p in (child, *child.children(recursive=True))))
            except psutil.Error:
                continue

    thread = threading.Thread(target=sample)
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
            shown = session.display_s(WINDOW_CELL)
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


# for people


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Each wait, then each comparison."""
    commands, large, screen, compared = (results[k] for k in ("commands", "large", "first_screen", "comparisons"))
    seconds, over = commands["seconds"], commands["over_report"]
    events = f"{large['events']:,} events"
    for what, key, target in (
        ("`gpulab report TRACE --json`, 104,158 spans of an H100", "report, first time", "report"),
        ("opening that trace again, `gpulab.load`", "opening again", "opening"),
        ("opening a stored run, `gpulab.load`", "opening a stored run", "opening"),
        ("`gpulab report TRACE --json` again, the whole command", "report, again", ""),
        ("`gpulab report` of a stored run, the whole command", "report of a stored run", ""),
        ("`gpulab --help`", "help", "command"),
        ("`gpulab runs`", "runs", "command"),
    ):
        yield Figure(what, seconds[key], "s", target=target)
    yield Figure.of_ratio("the first report, times faster than `json.load`", over.get("json.load"), "×", "over_json")
    yield Figure.of_ratio("the first report, times faster than HTA", over.get("HTA"), "×", "over_hta")
    first = large["first_time"]
    yield Figure(f"`gpulab report` of {events}, two cores", first["seconds"], "s", target="large")
    yield Figure("… the most memory of its processes", first["peak_bytes"] / 2**20, "MiB", target="large_memory")
    yield Figure(f"opening {events} again, `gpulab.load`", large["opening_again_s"], "s", target="opening")
    yield Figure(f"`gpulab report` of {events} again", large["again"]["seconds"], "s")
    yield Figure(f"last step to first screen, {screen['events']:,} events", screen["seconds"], "s", target="screen")
    yield Figure.of_ratio("… times faster than `key_averages()`", screen["over_gpulab"], "×", "over_key_averages")
    for row in compared:
        target = "near" if row["name"] == "5 % apart" else "" if row["name"] == "equal" else "far"
        yield Figure(f"`--ab`, {row['name']}: {row['verdict']}", row["seconds"], "s", target=target)
