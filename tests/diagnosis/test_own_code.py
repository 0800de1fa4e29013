"""Own code beside the training, which makes batches or measures: played loops, with looks at lines set by script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

import gpulab
from gpulab.analysis.facts import facts
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.rules.pauses import logging_or_eval
from gpulab.run import OwnBatches, Place, Run
from gpulab.thresholds import DEFAULT
from tests.support.core_readings import with_cores
from tests.support.host_loops import HostLoop, played
from tests.support.rule_tables import Case, Rows, assert_golden, check, first, table

DRAW, TRAIN = Place("loop.py", 7, "draw", "x = crops(data)"), Place("loop.py", 12, "", "loss = net(x)")


Step = Callable[[HostLoop], None]
Make = Callable[[], RuleContext]


def _step(loop: HostLoop) -> None:
    """Of 50 ms."""
    loop.operator("aten::stack", 12_000, 0)
    loop.python(8_000, 0)
    loop.operator("aten::addmm", 30_000, 1)


def _run(*, preparing: int = 0, own: OwnBatches | None = None, exact: bool = True) -> Run:
    """40 % of each step at the line that draws; `preparing`: the place whose looks are marked so."""
    run = played(_step, DRAW, TRAIN).run()
    assert run.stack is not None
    marks = (run.stack.place == preparing).astype(np.uint8)
    return replace(run, stack=replace(run.stack, prepares_batch=marks, exact=exact), own_batches=own)


def _on_a_core(computed: float) -> Run:
    """The training thread had a core for so much of the steps, which begin before the timeline does."""
    run = _run()
    began, last = int(run.steps.start_ns[0]), int(run.steps.end_ns[-1])
    run = with_cores(replace(run, wall_ns=last - began), computed=computed, waited=0.02, others=0.0)
    assert run.core_times is not None and run.core_use is not None
    times = replace(run.core_times, t_ns=run.core_times.t_ns + began)
    return replace(run, core_times=times, core_use=replace(run.core_use, t_ns=run.core_use.t_ns + began))


def _looked(looks: int, preparing: int) -> Run:
    """Beside the profiled steps a quarter of the time went to batches."""
    return _run(own=OwnBatches(looks, looked_ns=1_000_000, preparing_looks=preparing, preparing_ns=250_000))


def known(make: Callable[[], Run]) -> Make:
    return lambda: RuleContext(facts(make()), DEFAULT)


# Neither training nor a pause with a name

OWN = Place("train.py", 7, "confusion", "table[a, b] += 1")
TRAINING = Place("train.py", 20, "step", "model(x).sum().backward()")


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


def looked_from_outside(run: Run) -> Run:
    assert run.stack is not None
    return replace(run, stack=replace(run.stack, exact=True))


CASES: dict[str, Case] = table(
    Rows(
        first,
        {
            "the line that draws": (known(_run), 0.4 * 50e3),
            "a thread of ours names no line": (known(lambda: _run(exact=False)), 0.4 * 50e3),
            "at work": (known(lambda: _on_a_core(0.97)), "cpu_preprocessing"),
            "partly asleep": (known(lambda: _on_a_core(0.8)), "data_starved"),
            "asleep": (known(lambda: _on_a_core(0.65)), "storage_bound"),
            "unprofiled looks are believed first": (known(lambda: _looked(100, 24)), 0.25 * 50e3),
            "few unprofiled looks say nothing": (known(lambda: _looked(9, 2)), 0.4 * 50e3),
            "lines that cannot be followed": (known(lambda: _run(preparing=-9)), "cannot_tell"),
        },
    ),
    Rows(
        logging_or_eval,
        {
            "own code": (of(python(18_000)), 18_000, 0.05),
            "a library that does not come back": (of(python(10_000), calls_users=[]), 10_000, 0.05),
            "until the next operator": (of(until_next_operator, 20, looked_from_outside), 5_000, 0.04),
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
    ),
)


@pytest.mark.parametrize("name", CASES)
def test_own_code_is_named_for_what_it_does(name: str) -> None:
    check(CASES[name])


def test_what_is_said_is_the_golden_text() -> None:
    assert_golden("findings_own_code", {name: check(case) for name, case in CASES.items()})


def test_steps_that_a_loader_feeds_have_its_waits_alone() -> None:
    run = _run()
    fed = replace(run, steps=replace(run.steps, batch_count=np.ones_like(run.steps.batch_count)))
    for one, waits in ((run, 0.4), (fed, 0.0)):
        account = facts(one).breakdown
        assert account is not None and account.share["data_wait"] == pytest.approx(waits, abs=0.005)


def test_the_report_names_no_dataloader() -> None:
    text = str(gpulab.report(_run()))
    assert "making the next batch" in text
    assert not any(line.strip().startswith("waiting for the DataLoader") for line in text.splitlines())
