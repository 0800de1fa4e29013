"""Work that is neither training nor a pause with a name: played loops whose lines and looks are set by the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import facts
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.rules.pauses import logging_or_eval
from gpulab.run import Place, Run
from gpulab.thresholds import DEFAULT
from tests.support.host_loops import HostLoop, played
from tests.support.rule_tables import Case, Rows, assert_golden, check, table

OWN = Place("train.py", 7, "confusion", "table[a, b] += 1")
TRAINING = Place("train.py", 20, "step", "model(x).sum().backward()")
Step = Callable[[HostLoop], None]
Make = Callable[[], RuleContext]


def trained(loop: HostLoop) -> None:
    """A small step at the second of its places."""
    loop.operator("aten::linear", 40, 1)
    loop.operator("autograd::engine::evaluate_function: AddmmBackward0", 80, 1)
    with loop.annotated("Optimizer.step#SGD.step"):
        loop.operator("aten::_foreach_add_", 30, 1)


def python(us: float, before: Step | None = None) -> Step:
    """Such a step after own code without operators, three times."""

    def step(loop: HostLoop) -> None:
        for _ in range(3):
            if before is not None:
                before(loop)
            loop.python(us / 3, 0)
        trained(loop)

    return step


def product(loop: HostLoop) -> None:
    loop.operator("aten::mm", 12_000, 0)


def until_next_operator(loop: HostLoop) -> None:
    """The last look at own code comes before it ends."""
    loop.python(5_000, 0)
    loop.operator("aten::mm", 2_300, 1)


def small(
    between_us: float = 15, *, in_steps: Sequence[int] = (), waits_us: float = 0.0, holds_us: float = 0.0
) -> Step:
    """A small model, from each of whose operators to the next Python takes so long.

    In some steps its thread waits for a core; at the end of each the own line may hold the lock.
    """

    def step(loop: HostLoop) -> None:
        for name in ("linear", "relu", "linear", "cross_entropy_loss"):
            loop.operator(f"aten::{name}", 30, 1)
            loop.python(between_us, 1)
        for node in ("NllLossBackward0", "AddmmBackward0", "ReluBackward0", "AddmmBackward0"):
            loop.operator(f"autograd::engine::evaluate_function: {node}", 40, 1)
            loop.python(10, 1)
        with loop.annotated("Optimizer.step#AdamW.step"):
            loop.operator("aten::_fused_adamw_", 25, 1)
            loop.python(10, 1)
        loop.python(waits_us if len(loop.steps_us) in in_steps else 0, 1)
        loop.python(holds_us, 0)

    return step


def of(step: Step, steps: int = 5, change: Callable[[Run], Run] = lambda run: run, **looks: Sequence[int]) -> Make:
    return lambda: RuleContext(facts(change(played(step, OWN, TRAINING, steps=steps).run(**looks))), DEFAULT)


def looked_at_end(step: Step, steps: int, rows: Sequence[int]) -> Make:
    """Looked at only at the end of these steps."""

    def make() -> RuleContext:
        loop = played(step, OWN, TRAINING, steps=steps)
        return RuleContext(facts(loop.run([loop.steps_us[i][1] - 1 for i in rows])), DEFAULT)

    return make


def of_keras(*, throughout: bool) -> Callable[[Run], Run]:
    """The own line is keras's; `throughout`: it holds all steps, as a loop of the library does."""

    def change(run: Run) -> Run:
        assert run.stack is not None
        flags = ((run.stack.place == 0) & throughout).astype(np.uint8)
        number = np.zeros(len(run.stack.t_ns), np.int32)
        stack = replace(run.stack, exact=True, throughout=flags, library=number)
        return replace(run, stack=stack, libraries=("keras",))

    return change


CASES: dict[str, Case] = table(
    Rows(
        logging_or_eval,
        {
            "own code": (of(python(18_000)), 18_000, 0.05),
            "a library that does not come back": (of(python(10_000), calls_users=[]), 10_000, 0.05),
            "until the next operator": (
                of(until_next_operator, 20, of_keras(throughout=False)),
                5_000,
                0.04,
            ),
            "until the next one, of a library": (
                of(until_next_operator, 20, of_keras(throughout=True)),
                5_000,
                0.04,
            ),
            "a library's own Python": (of(python(10_000), 5, of_keras(throughout=True)), 10_000, 0.05),
            "one look a step at a call with the lock": (
                looked_at_end(small(holds_us=30_000), 3, range(3)),
                30_000,
                0.05,
            ),
        },
        {
            "gaps between operators of a function that computes": of(python(18_000, product)),
            "a library that comes back": of(python(10_000), calls_users=[0]),
            "a small model": of(small(), 40),
            "looks without a core": looked_at_end(small(100, in_steps=(1, 3), waits_us=20_000), 5, (1, 3)),
        },
    )
)


@pytest.mark.parametrize("name", CASES)
def test_own_code_is_named_where_it_takes_the_time(name: str) -> None:
    check(CASES[name])


def test_what_is_said_is_the_golden_text() -> None:
    assert_golden("findings_other_work", {name: check(case) for name, case in CASES.items()})
