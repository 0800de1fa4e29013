"""How blocks are laid out: sizes, order, number. Pure."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.run import Loader, Run, StepFlag, Steps
from gpulab.tuning import schedule
from gpulab.tuning.schedule import Size
from tests.support.synthetic import no_trace_case


def run_of(count: int, step_ms: float, workers: int = 0, outcome: str = "stopped") -> Run:
    base = no_trace_case().run
    number = np.arange(1, count + 1)
    end = (number * step_ms * 1e6).astype(np.int64)
    zero = np.zeros(count, np.int64)
    steps = Steps(
        number,
        end - int(step_ms * 1e6),
        end,
        zero,
        zero,
        zero + 1,
        zero + 8,
        zero.astype(np.uint8),
        zero.astype(np.uint8),
    )
    loader = Loader("D", 800, 8, workers, 2 if workers else None, False, False, 100, False)
    return replace(base, steps=steps, loader=loader, outcome=outcome, traced_numbers=(), timeline=None)


@pytest.mark.parametrize(
    ("step_ms", "workers", "warmup", "counted"),
    [
        (50, 0, 3, 10),
        (500, 0, 3, 5),
        (1, 0, 3, 200),  # 0.2 s at least
        (50, 2, 6, 10),  # 2 workers times 2 batches ahead, and 2
        (50, 4, 10, 12),  # whole rounds of 4
        (500, 4, 10, 8),
    ],
)
def test_the_size_of_a_block(step_ms: float, workers: int, warmup: int, counted: int) -> None:
    assert schedule.block_size([run_of(40, step_ms), run_of(40, step_ms, workers)]) == Size(warmup, counted)


def test_a_cell_that_ends_by_itself_has_shorter_blocks() -> None:
    assert schedule.block_size([run_of(8, 50, outcome="completed")]) == Size(3, 5)
    assert schedule.block_size([run_of(4, 50, 4, outcome="completed")]) == Size(2, 2)
    assert schedule.block_size([run_of(1, 50, outcome="completed")]) == Size(0, 1)


def test_as_many_steps_as_asked_for() -> None:
    assert schedule.block_size([run_of(40, 50)], counted=7) == Size(3, 7)


@given(st.integers(2, 8), st.integers(0, 10**6))
def test_each_turn_runs_a_twice_and_every_other_arm_once(arms: int, seed: int) -> None:
    order = schedule.turn_order(arms, random.Random(seed))
    assert Counter(order) == Counter({0: 2, **dict.fromkeys(range(1, arms), 1)})


def test_orders_differ() -> None:
    source = random.Random(0)
    assert len({tuple(schedule.turn_order(2, source)) for _ in range(50)}) == 3


@pytest.mark.parametrize(
    ("budget", "turn", "asked", "pairs"), [(60, 1, None, 30), (60, 4, None, 15), (1, 9, None, 3), (1, 9, 8, 8)]
)
def test_what_fits_into_the_time(budget: float, turn: float, asked: int | None, pairs: int) -> None:
    assert schedule.pairs_within(budget, turn, asked) == pairs


def test_warmup_compiled_and_cut_steps_do_not_count() -> None:
    steps = run_of(8, 10).steps
    flags = steps.flags.copy()
    flags[4] = StepFlag.COMPILE
    flags[7] = StepFlag.PARTIAL
    assert schedule.counted_rows(replace(steps, flags=flags), Size(3, 10)).tolist() == [3, 5, 6]
    assert schedule.counted_rows(steps, Size(2, 3)).tolist() == [2, 3, 4]
