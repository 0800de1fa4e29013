"""A loop that makes its batches itself waits for data: played loops whose lines and looks are set by the script."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

import gpulab
from gpulab.analysis.breakdown import breakdown
from gpulab.analysis.facts import facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import OwnBatches, Place, Run
from tests.support.core_readings import with_cores
from tests.support.host_loops import HostLoop, played

DRAW, TRAIN = Place("loop.py", 7, "draw", "x = crops(data)"), Place("loop.py", 12, "", "loss = net(x)")


def _step(loop: HostLoop) -> None:
    loop.operator("aten::stack", 12_000, 0)
    loop.python(8_000, 0)
    loop.operator("aten::addmm", 30_000, 1)


def _run(*, preparing: int = 0, own: OwnBatches | None = None, exact: bool = True) -> Run:
    """40 % of each step at the line that draws; `preparing`: the place whose looks are marked so."""
    run = played(_step, DRAW, TRAIN).run()
    assert run.stack is not None
    marks = (run.stack.place == preparing).astype(np.uint8)
    stack = replace(run.stack, prepares_batch=marks, exact=exact)
    return replace(run, stack=stack, own_batches=own)


def test_a_thread_of_ours_names_no_line_that_makes_a_batch() -> None:
    seen = diagnose(facts(_run(exact=False))).first
    assert seen.key == "data_starved" and seen.source_line == ""


def test_making_a_batch_is_waiting_for_data() -> None:
    found = diagnose(facts(_run())).first
    assert found.key == "data_starved"
    assert "40 %" in found.summary
    assert found.source_line == str(DRAW)
    assert not found.settings  # no knob of a DataLoader cures it
    assert "DataLoader(" in found.cure and "thread" in found.cure


def _on_a_core(computed: float) -> Run:
    """The training thread had a core for so much of the steps, which begin before the timeline does."""
    run = _run()
    first, last = int(run.steps.start_ns[0]), int(run.steps.end_ns[-1])
    run = with_cores(replace(run, wall_ns=last - first), computed=computed, waited=0.02, others=0.0)
    assert run.core_times is not None and run.core_use is not None
    times = replace(run.core_times, t_ns=run.core_times.t_ns + first)
    use = replace(run.core_use, t_ns=run.core_use.t_ns + first)
    return replace(run, core_times=times, core_use=use)


def test_batches_that_keep_the_processor_at_work_are_preparing() -> None:
    busy = diagnose(facts(_on_a_core(0.97)))
    assert busy.first.key == "cpu_preprocessing" and busy.of("data_starved") is None
    assert "40 %" in busy.first.summary and "work for the processor" in busy.first.summary
    some = diagnose(facts(_on_a_core(0.8)))
    assert some.first.key == "data_starved" and some.of("cpu_preprocessing") is None
    asleep = diagnose(facts(_on_a_core(0.65)))
    assert asleep.first.key == "storage_bound" and asleep.of("data_starved") is None
    assert "a disk, a network or a lock" in asleep.first.summary


def test_the_accounting_says_the_same() -> None:
    account = breakdown(_run())
    assert account is not None
    assert round(account.share["data_wait"], 2) == 0.4
    assert round(account.share["compute"], 2) == 0.6


def test_unprofiled_looks_are_believed_before_profiled_ones() -> None:
    own = OwnBatches(looks=100, looked_ns=1_000_000, preparing_looks=24, preparing_ns=250_000)
    assert "25 %" in diagnose(facts(_run(own=own))).first.summary


def test_few_unprofiled_looks_say_nothing() -> None:
    own = OwnBatches(looks=9, looked_ns=1_000_000, preparing_looks=2, preparing_ns=250_000)
    assert "40 %" in diagnose(facts(_run(own=own))).first.summary


def test_lines_that_cannot_be_followed_stay_unknown() -> None:
    run = _run(preparing=-9)
    assert diagnose(facts(run)).of("data_starved") is None


def test_steps_that_a_loader_feeds_have_its_waits_alone() -> None:
    run = _run()
    steps = replace(run.steps, batch_count=np.ones_like(run.steps.batch_count))
    account = breakdown(replace(run, steps=steps))
    assert account is not None
    assert account.share["data_wait"] == 0.0


def test_the_report_names_no_dataloader() -> None:
    text = str(gpulab.report(_run()))
    assert "making the next batch" in text
    assert not any(line.strip().startswith("waiting for the DataLoader") for line in text.splitlines())
