"""Batches that the loop makes itself: a played loop, with looks at lines set by script."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

import gpulab
from gpulab.analysis.facts import facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import RuleContext
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


def _measuring(loop: HostLoop) -> None:
    """The same, and 30 ms of Python."""
    loop.python(30_000, 0)
    _step(loop)


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
)


@pytest.mark.parametrize("name", CASES)
def test_making_batches_is_named_for_what_it_does(name: str) -> None:
    check(CASES[name])


def test_what_is_said_is_the_golden_text() -> None:
    assert_golden("findings_own_batches", {name: check(case) for name, case in CASES.items()})


def test_steps_that_a_loader_feeds_have_its_waits_alone() -> None:
    run = _run()
    fed = replace(run, steps=replace(run.steps, batch_count=np.ones_like(run.steps.batch_count)))
    for one, waits in ((run, 0.4), (fed, 0.0)):
        account = facts(one).breakdown
        assert account is not None and account.share["data_wait"] == pytest.approx(waits, abs=0.005)


def test_too_few_samples_leave_open_whose_python_code_it_is() -> None:
    run = played(_measuring, DRAW, TRAIN).run()
    told = [u.what for u in diagnose(facts(run)).untold if u.key == "logging_or_eval"]
    assert told == ["Which of your Python code takes the time without a PyTorch operator"]
    assert not [u for u in diagnose(facts(_run())).untold if u.key == "logging_or_eval"], "hardly any such time"


def test_the_report_names_no_dataloader() -> None:
    text = str(gpulab.report(_run()))
    assert "making the next batch" in text
    assert not any(line.strip().startswith("waiting for the DataLoader") for line in text.splitlines())
