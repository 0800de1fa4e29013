"""What gpulab itself costs is no part of a step nor of its wait for data: with marks and clocks set by the script."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.analysis.facts import facts
from gpulab.knobs.observer import observe
from gpulab.run import Steps
from gpulab.tape.marks import Kind
from tests.support.rule_cases import run_of
from tests.support.tapes import Told

US = 1_000
PACKAGE = Path(gpulab.__file__).parent


def test_a_step_runs_our_code_in_four_files() -> None:
    """With a loader, and what the panel asks of a cell: most steps, for at some of them somebody acts."""
    model, steps = torch.nn.Linear(2, 2), list[set[str]]()
    optimizer = torch.optim.SGD(model.parameters())

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            steps[-1].add(path.name)

    with observe(), gpulab.profile(save=False):
        for number, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(500, 2)))):
            steps.append(set())
            sys.setprofile(note if number >= 450 else None)
            model(x).sum().backward()
            optimizer.step()
        sys.setprofile(None)
    (files, count), *_ = Counter(map(frozenset, steps[450:-1])).most_common()
    assert files == {"marks.py", "torch_hooks.py", "arguments.py", "batch_clock.py"} and count > 25


def _steps(own_us: int, mark_us: int) -> Steps:
    """Ten steps of 100 µs, of which a loader takes 40; gpulab works at each mark, at some of them for longer."""
    told, now = Told(mark_ns=mark_us * US), 0
    for _ in range(10):
        told.asked(1, now)
        now += own_us * US
        told.mark(now, Kind.OWN, own_us * US)
        now += (40 + own_us) * US
        told.mark(now, Kind.OWN, own_us * US)
        told.answered(now, "batch", 4)
        now += 30 * US
        told.backward(now)
        now += own_us * US
        told.mark(now, Kind.OWN, own_us * US)
        now += 10 * US
        told.optimized(1, now, now + 20 * US)
        now += (20 + 9 * mark_us) * US
    told.asked(1, now)
    return told.steps(now)


@pytest.mark.parametrize("mark_us", [0, 1])
@pytest.mark.parametrize("own_us", [0, 7, 70])
def test_steps_are_as_long_as_without_gpulab(own_us: int, mark_us: int) -> None:
    steps = _steps(own_us, mark_us)
    own_us = 3 * own_us + 9 * mark_us
    assert (steps.time_ns == 100 * US).all()
    assert (steps.data_wait_ns == 40 * US).all()
    assert (steps.own_ns == own_us * US).all()
    assert (steps.wall_ns == (100 + own_us) * US).all()


def test_our_time_never_exceeds_what_a_step_has() -> None:
    told = Told()
    told.asked(1, 0)
    told.answered(60, "batch", 4)
    told.mark(60, Kind.OWN, 1_000)  # a core was taken away from us
    told.optimized(1, 80, 90)
    steps = told.steps(100)
    assert (steps.own_ns <= steps.wall_ns - steps.data_wait_ns).all()


def test_the_figures_are_without_our_time() -> None:
    run = run_of(wait=0.25)
    assert not len(run.steps.own_ns) and (run.steps.time_ns == run.steps.wall_ns).all(), "as an older record"
    wall_us = float(np.median(run.steps.wall_ns)) / 1e3
    own = np.full(len(run.steps), 2_000 * US, np.int64)
    figures = facts(replace(run, steps=replace(run.steps, own_ns=own)))
    assert figures.step_us is not None
    assert figures.step_us.median == pytest.approx(wall_us - 2_000)
    assert figures.observer_us_per_step == pytest.approx(2_000)
    outside = facts(run).outside_steps_fraction
    assert figures.outside_steps_fraction == pytest.approx(outside)
