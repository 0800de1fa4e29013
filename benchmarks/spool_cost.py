"""What the spool of a run adds to a step of 10 ms, and the look at the flight recorder to a step of two gloo ranks.

Both happen once a second on a thread of gpulab's, too seldom to be seen in so short a measurement. So here they happen
ten times as often, in every other block of one and the same run, and a tenth of what they add is what they cost.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import ratio_with_interval
from benchmarks.own_process import ROOT, in_own_process

OFTENER = 10
STEP_S = 0.010
BLOCK_STEPS = 50
PAIRS = 80
RANK_PAIRS = 60
SIZE = 256  # of the matrices whose products are a step


def measure() -> dict[str, object]:
    """Of the spool, in one process: about 80 s."""
    with tempfile.TemporaryDirectory() as folder:
        return in_own_process(__name__, "spool", folder=folder)


def measure_look() -> dict[str, object]:
    """Of the look at the flight recorder, in two ranks: about 70 s."""
    with tempfile.TemporaryDirectory() as folder:
        script, answer = Path(folder, "ranks.py"), Path(folder, "answer.json")
        script.write_text(f"from benchmarks.spool_cost import rank\nrank({str(answer)!r})\n")
        own = {"GPULAB_DIR": folder, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        record = ["-m", "gpulab", "record", "--ranks", "2", "--no-trace", "--no-live", str(script)]
        command = [sys.executable, *record]
        subprocess.run(command, cwd=ROOT, env=os.environ | own, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, object] = json.loads(answer.read_text())
        return found


def spool(folder: str) -> dict[str, Any]:
    """In this process. Blocks with the spool and blocks without it take turns, in random order within each pair."""
    import torch

    import gpulab
    from gpulab.capture import recorder, spooler

    os.environ["GPULAB_DIR"] = folder
    torch.set_num_threads(1)
    work = _work(torch)
    with gpulab.profile(trace=False, live=False, show=False):
        assert recorder.active is not None
        own = recorder.active._spooler
        write, took = _timed(own._write)

        def turn(on: bool) -> None:
            own._write = write if on else _nothing

        return _blocks(work, turn, took, PAIRS, spooler)


def rank(answer: str) -> None:
    """In each of the two ranks: blocks with the look and blocks without it, which begin at the same steps in both."""
    import torch
    import torch.distributed as dist

    from gpulab.capture import recorder, spooler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradient = torch.zeros(1000)
    alone = _work(torch, STEP_S / 2)

    def work() -> None:
        dist.all_reduce(gradient)
        alone()
        dist.all_reduce(gradient)

    look, took = _timed(recorder.arrivals)

    def turn(on: bool) -> None:
        vars(recorder)["arrivals"] = look if on else _no_arrivals

    found = _blocks(work, turn, took, RANK_PAIRS, spooler)
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(found))
    dist.destroy_process_group()


def _blocks(
    work: Callable[[], None], turn: Callable[[bool], None], took: list[float], pairs: int, spooler: Any
) -> dict[str, Any]:
    order, ratios, bare = random.Random(0), [], []
    spooler.PERIOD_S, period_s = spooler.PERIOD_S / OFTENER, spooler.PERIOD_S
    try:
        time.sleep(period_s)  # the thread's last long wait
        for _ in range(BLOCK_STEPS):
            work()
        for _ in range(pairs):
            arms = order.sample([True, False], 2)
            seconds = {on: _block(work, turn, on) for on in arms}
            ratios.append(seconds[True] / seconds[False])
            bare.append(seconds[False] / BLOCK_STEPS)
    finally:
        spooler.PERIOD_S = period_s
        turn(True)
    found = ratio_with_interval(ratios)
    added = [(value - 1) / OFTENER for value in (found["ratio"], *found["interval"])]  # type: ignore[misc]
    return {
        "oftener": OFTENER,
        "step_ms": 1e3 * sorted(bare)[len(bare) // 2],
        "oftener_ratio": found,
        "added": {"ratio": 1 + added[0], "interval": [1 + added[1], 1 + added[2]], "pairs": pairs},
        "looks": len(took),
        "look_ms": 1e3 * sorted(took)[len(took) // 2] if took else None,
    }


def _block(work: Callable[[], None], turn: Callable[[bool], None], on: bool) -> float:
    turn(on)
    began = time.perf_counter()
    for _ in range(BLOCK_STEPS):
        work()
    return time.perf_counter() - began


def _work(torch: Any, step_s: float = STEP_S) -> Callable[[], None]:
    """A step of about that length, with an optimizer that says that it is one."""
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10))], lr=0.1)
    for count in (20, 200):
        began = time.perf_counter()
        for _ in range(count):
            left @ right
        each_s = (time.perf_counter() - began) / count
    products = max(1, round(step_s / each_s))

    def work() -> None:
        for _ in range(products):
            left @ right
        optimizer.step()

    return work


def _timed(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[float]]:
    """The same function, and the processor time of each call."""
    took: list[float] = []

    def timed(*arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*arguments)
        finally:
            took.append(time.thread_time() - began)

    return timed, took


def _nothing(*arguments: Any) -> None:
    pass


def _no_arrivals() -> tuple[()]:
    return ()


def section(kept: dict[str, Any]) -> list[str]:
    """Of the table for people."""
    return ["## The spool of a run", "", *_section(kept, "written", "≤ 0.2 % of a step of 10 ms")]


def look_section(kept: dict[str, Any]) -> list[str]:
    """Of the table for people."""
    return ["## The look of two ranks at their collectives", "", *_section(kept, "looked", "≤ 1 % of a step of 10 ms")]


def _section(kept: dict[str, Any], does: str, aim: str) -> list[str]:
    added, oftener = kept["added"], kept["oftener_ratio"]

    def percent(found: dict[str, Any]) -> str:
        value, low, high = (100 * (v - 1) for v in (found["ratio"], *found["interval"]))
        return f"{value:+.3f} % [{low:+.3f}, {high:+.3f}]"

    return [
        f"Once a second, on a thread of its own. Blocks in which it is {does} {kept['oftener']} times as often and",
        "blocks in which it is not take turns within one run; a tenth of what that adds is what once a second adds.",
        f"Aim: {aim}.",
        "",
        f"| step | {kept['oftener']} times as often | once a second | processor time of each |",
        "|---|---|---|---|",
        f"| {kept['step_ms']:.1f} ms | {percent(oftener)} | {percent(added)} | {kept['look_ms']:.2f} ms |",
    ]
