"""Loops whose device time per step is certain, with the host far ahead of the GPU, against CUDA events of our own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from msgspec import Struct

import gpulab
from benchmarks.gpu_first.answer import Answer
from benchmarks.gpu_first.stage import Mark, Stage
from gpulab.analysis.facts import Facts, facts
from gpulab.run import Category, Run, Timeline

SETTLED = 4  # steps after which the queue is as full as it gets


class Case(Struct, frozen=True):
    """A loop: `launches` kernels of equal length in a step, as one CUDA graph or one by one, with or without a wait."""

    launches: int
    steps: int = 30
    step_ms: float = 40.0
    graph: bool = False
    item: bool = False

    @property
    def name(self) -> str:
        """In words."""
        how = "one graph of " if self.graph else ""
        return f"{how}{self.launches} kernels, {self.steps} steps{', .item()' if self.item else ''}"


CASES = (
    Case(40),
    Case(150),
    Case(600),
    Case(150, graph=True),
    Case(150, item=True),
    Case(150, steps=300, step_ms=20.0),
    Case(150, steps=300, step_ms=20.0, graph=True),
    Case(40, item=True),
    Case(600, item=True),
    Case(150, graph=True, item=True),
    Case(40, steps=300, step_ms=20.0),
    Case(600, steps=300, step_ms=20.0),
    Case(150, steps=300, step_ms=20.0, item=True),
)
SMALL = (Case(4), Case(6, graph=True, item=True))


class Truth(Struct, frozen=True):
    """Milliseconds of the device's time between the ends of one step and the next, by events of our own."""

    step_ms: tuple[float, ...]

    def us_of(self, rows: list[int]) -> float | None:
        """The median of these steps; row i ends at mark i, so the first step has none."""
        chosen = [self.step_ms[row - 1] for row in rows if 1 <= row <= len(self.step_ms)]
        return 1e3 * median(chosen) if chosen else None

    @property
    def settled_us(self) -> float | None:
        """The median of all steps but the first few."""
        return self.us_of(list(range(SETTLED, len(self.step_ms) + 1)))


def measure(answer: Answer, stage: Stage) -> None:
    """Every loop under gpulab."""
    for case in SMALL if stage.simulated else CASES:
        with answer.guarded(f"step, {case.name}", "the time between CUDA events"):
            run, truth = profiled(stage, case)
            judge(answer, stage, case, facts(run), truth)


def profiled(stage: Stage, case: Case) -> tuple[Run, Truth]:
    """The loop under gpulab, and what its steps took."""
    loop, marks = prepared(stage, case)
    with gpulab.profile(case.name, device=stage.device, live=False, save=False, show=False) as profile:
        loop()
    stage.synchronize()
    return profile.run, Truth(tuple(stage.apart_ms(earlier, later) for earlier, later in pairwise(marks)))


def prepared(stage: Stage, case: Case) -> tuple[Callable[[], None], list[Mark]]:
    """The loop, and the marks that it leaves at the end of each step. A step has `launches` + 1 kernels."""
    weight = torch.nn.Parameter(torch.zeros(1024, device=stage.device))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1, foreach=False)  # one kernel
    spin = stage.spinner()
    marks: list[Mark] = []

    def launch() -> None:
        for _ in range(case.launches):
            spin(case.step_ms / case.launches)

    work = stage.graph_of(launch) if case.graph else launch
    stage.synchronize()

    def loop() -> None:
        for _ in range(case.steps):
            work()
            optimizer.step()
            if case.item:
                weight[0].item()
            marks.append(stage.mark())

    return loop, marks


def judge(answer: Answer, stage: Stage, case: Case, shown: Facts, truth: Truth) -> None:
    """gpulab's figures against the events."""
    run = shown.run
    rows = np.flatnonzero(np.isin(run.steps.number, run.traced_numbers)).tolist()
    inner = rows[:-1]  # the last one's mark comes after the profiler has stopped
    step_us = None if shown.step_us is None else shown.step_us.median
    traced_us = None if shown.traced_step_us is None else shown.traced_step_us.median
    figures = kernel_figures(shown)
    answer.figure(
        case.name,
        {
            "step_us": step_us,
            "traced_step_us": traced_us,
            "truth_us": truth.settled_us,
            "traced_truth_us": truth.us_of(inner),
            "steps": len(run.steps),
            "counted": shown.selection.rows.tolist(),
            "traced": rows,
            "truth_ms": list(truth.step_ms),
            "device_ms": (run.steps.device_ns / 1e6).tolist(),
            "host_ms": (run.steps.wall_ns / 1e6).tolist(),
            "choices": [f"{choice.what}: {choice.value}" for choice in run.choices],
            "missing": [f"{lost.what}: {lost.reason}" for lost in run.missing],
            **figures,
        },
    )
    answer.near(f"step, {case.name}", step_us, truth.settled_us, 0.05, " µs")
    answer.near(f"traced step, {case.name}", traced_us, truth.us_of(inner), 0.1, " µs")
    expected = f"{case.launches + 1} in each traced step"
    if stage.simulated:
        answer.unmeasured(f"kernels, {case.name}", expected, "simulated")
        return
    counts = figures["kernels_in_steps"]
    right = bool(counts) and all(count == case.launches + 1 for count in counts)
    answer.check(f"kernels, {case.name}", expected, str(counts), agrees=right, note=str(figures["integrity"]))


def kernel_figures(shown: Facts) -> dict[str, Any]:
    """What gpulab holds of the device in the traced steps."""
    account, timeline = shown.breakdown, shown.run.timeline
    trust = shown.integrity
    windows = [] if account is None else [(step.start_ns, step.end_ns) for step in account.steps]
    return {
        "kernels_per_step": sum(row.calls_per_step for row in shown.kernels),
        "kernels_in_steps": [] if timeline is None else kernels_in(timeline, windows),
        "busy_fraction": None if account is None else account.busy_fraction,
        "integrity": {} if trust is None else {c.name: c.count for c in trust.checks if c.count},
        "withheld": [] if trust is None else sorted(trust.withheld),
    }


def kernels_in(timeline: Timeline, windows: list[tuple[int, int]]) -> list[int]:
    """How many kernels begin in each window."""
    starts = timeline.start_ns[timeline.category == Category.KERNEL]
    return [int(((starts >= begin) & (starts < end)).sum()) for begin, end in windows]
