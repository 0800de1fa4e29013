"""What a mark costs, by a clock that the test turns."""

from __future__ import annotations

import random

from gpulab.tape.marks import Kind, Tape, cost_ns, mark_cost_ns


class Clock:
    """Each look at it takes 40 ns."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 40
        return self.ns


def test_neither_the_clock_nor_a_rare_delay_counts() -> None:
    clock, rng, kinds = Clock(), random.Random(0), set[int]()

    def mark(kind: int, argument: int) -> None:
        kinds.add(kind)
        clock.ns += 250 + rng.choice((-10, 0, 10)) + (1_000_000 if rng.random() < 0.1 else 0)

    assert abs(cost_ns(mark, clock) - 250) <= 10
    assert kinds == {Kind.HAND}
    assert cost_ns(lambda kind, argument: None, clock) == 0


def test_it_is_measured_once_and_no_tape_of_a_run_is_touched() -> None:
    tape = Tape()
    assert mark_cost_ns() > 0
    assert mark_cost_ns.cache_info().misses == 1
    mark_cost_ns()
    assert mark_cost_ns.cache_info().misses == 1 and len(tape.marks()) == 0
