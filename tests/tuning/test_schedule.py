"""How blocks are laid out: sizes, order, number; and what their runs are called. Pure."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from gpulab.knobs.variables import Variables
from gpulab.run import Loader, Run, StepFlag
from gpulab.tuning import schedule
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution
from gpulab.tuning.resolve import ResolvedArm, Setting
from gpulab.tuning.schedule import Arm, Plan, Size
from tests.support.synthetic import no_trace_case
from tests.support.timelines import steps_between


def run_of(count: int, step_ms: float, workers: int = 0, outcome: str = "stopped") -> Run:
    base = no_trace_case().run
    end = (np.arange(1, count + 1) * step_ms * 1e6).astype(np.int64)
    steps = steps_between(end - int(step_ms * 1e6), end, first=1, batch_count=1, sample_count=8, phase=0)
    loader = Loader("D", 800, 8, workers, 2 if workers else None, False, False, 100, False)
    return replace(base, steps=steps, loader=loader, outcome=outcome, traced_numbers=(), timeline=None)


@pytest.mark.parametrize(
    ("count", "step_ms", "workers", "size"),
    [
        (40, 50, 0, Size(3, 10)),
        (40, 500, 0, Size(3, 5)),
        (40, 1, 0, Size(3, 200)),  # 0.2 s at least
        (40, 50, 2, Size(6, 10)),  # 2 workers times 2 batches ahead, and 2
        (40, 50, 4, Size(10, 12)),  # whole rounds of 4
        (40, 500, 4, Size(10, 8)),
        (8, 50, 0, Size(3, 5)),  # a cell that ends by itself has shorter blocks
        (15, 50, 4, Size(0, 15)),  # seven steps fed by what was read ahead would look free
        (4, 50, 4, Size(0, 4)),
        (1, 50, 0, Size(0, 1)),
    ],
)
def test_the_size_of_a_block(count: int, step_ms: float, workers: int, size: Size) -> None:
    if count < 40:
        assert schedule.block_size([run_of(count, step_ms, workers, "completed")]) == size
    else:
        assert schedule.block_size([run_of(40, step_ms), run_of(40, step_ms, workers)]) == size
        assert schedule.block_size([run_of(40, 50)], steps=7) == Size(3, 7), "as many as asked for"


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_each_turn_runs_a_twice_and_every_other_arm_once(arms: int, seed: int) -> None:
    order = schedule.turn_order(arms, random.Random(seed))
    assert Counter(order) == Counter({0: 2, **dict.fromkeys(range(1, arms), 1)})


def test_orders_differ() -> None:
    source = random.Random(0)
    assert len({tuple(schedule.turn_order(2, source)) for _ in range(50)}) == 3


@pytest.mark.parametrize(
    ("budget", "turn", "asked", "pairs"), [(60, 1, None, 30), (60, 4, None, 15), (1, 9, None, 4), (1, 9, 8, 8)]
)
def test_what_fits_into_the_time(budget: float, turn: float, asked: int | None, pairs: int) -> None:
    assert schedule.pairs_within(budget, turn, asked) == pairs


def test_warmup_compiled_and_cut_steps_do_not_count() -> None:
    steps = run_of(8, 10).steps
    flags = steps.flags.copy()
    flags[4] = StepFlag.COMPILE
    flags[7] = StepFlag.PARTIAL
    assert schedule.block_rows(replace(steps, flags=flags), Size(3, 10)).tolist() == [3, 5, 6]
    assert schedule.block_rows(steps, Size(2, 3)).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "name", "labels"),
    [
        ([{"workers": 2}, {"workers": 4}], "", ["workers=2,4: baseline", "workers=2", "workers=4"]),
        ([{"workers": 2}], "monday", ["monday: baseline", "monday: workers=2"]),
        (
            [{"workers": w, "amp": amp} for w in (1, 2) for amp in ("off", "bf16")],
            "",
            ["workers=1,2, amp=off,bf16: baseline"],
        ),
        ([], "", ["baseline"]),
    ],
)
def test_what_the_runs_of_a_plan_are_called(settings: list[dict[str, Any]], name: str, labels: list[str]) -> None:
    plan = Plan(tuple(map(Arm, settings)), name=name)
    assert [plan.run_name(arm) for arm in (plan.base, *plan.arms)][: len(labels)] == labels


class Counting(Code, frozen=True):
    """Counts how often somebody looks for its variables."""

    looks: ClassVar[int] = 0

    @property
    def variables(self) -> Variables:
        Counting.looks += 1
        return super().variables


@pytest.mark.parametrize(("text", "within"), [("y = x", 2), ("x = 1\ny = x", 1)])
def test_variables_are_looked_for_once_not_in_each_block(text: str, within: int) -> None:
    namespace = {"x": 1}
    parsed = Code.of_text(text, namespace)
    code = Counting(**asdict(parsed))
    Counting.looks = 0
    execution = Execution(code, ResolvedArm((Setting("x", 2, None),)))
    for _ in range(3):
        with execution.applied(in_full=False):
            assert namespace["x"] == within  # a literal of the code is replaced in its text
        assert namespace["x"] == 1
    assert Counting.looks == 1
