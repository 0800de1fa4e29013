"""A process that does not get its cores: the competition is named, and nothing else is said to be well or at fault."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.host.core_time import core_share
from gpulab.analysis.host.dataloader import LoadingFacts, loading
from gpulab.diagnosis.context import RuleContext
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.formatting import duration
from gpulab.run import Batches, Run
from tests.support.core_readings import with_cores
from tests.support.rule_cases import case_of, inside, run_of

QUIET: dict[str, Any] = {"computed": 0.97, "waited": 0.02, "got": 1.0, "others": 0.1}
BUSY: dict[str, Any] = {"computed": 0.3, "waited": 0.68, "got": 0.3, "others": 1.6}


def on(
    run: Run, inside: LoadingFacts | None = None, threads: int = 1, data_wait: float = 0.0, **readings: Any
) -> RuleContext:
    """The run on a machine of two cores with these readings; the part of a step without a core is that of them."""
    run = with_cores(run, **readings)
    run = replace(run, environment=replace(run.environment, compute_threads=threads))
    share = core_share(run)
    assert share is not None
    waited = share.thread_wait_fraction or 0.0
    return case_of(run, {"core_wait": waited, "data_wait": data_wait}, inside, cores=share)


def said(context: RuleContext) -> Diagnosis:
    return diagnose(context.facts, context.thresholds)


def test_other_programs_on_the_cpu_are_named_first() -> None:
    first = said(on(run_of(), **BUSY)).first
    assert first.key == "cpu_shared" and first.level == "bad"
    assert first.summary == "Other programs take your CPU: the process got 0.3 of 2 cores."
    assert first.recoverable_us_per_step == pytest.approx(0.68 * 20e3, rel=0.03)
    words = " ".join(e.words for e in first.evidence)
    assert "68 %" in words and "other programs used 1.6 cores" in words
    assert first.settings == ()


def test_a_quiet_machine_has_no_competition() -> None:
    result = said(on(run_of(), **QUIET))
    assert result.first.key == "healthy" and result.of("cpu_shared") is None
    short_turns = said(on(run_of(), **QUIET | {"waited": 0.12}))
    assert short_turns.of("cpu_shared") is None  # nobody else was there


@pytest.mark.parametrize("waited", [0.12, 0.4, 0.9])
@pytest.mark.parametrize("others", [None, 0.0, 0.5, 1.9])
def test_no_green_verdict_on_steps_without_a_core(waited: float, others: float | None) -> None:
    context = on(run_of(), computed=1 - waited, waited=waited, got=1 - waited, others=others)
    assert said(context).first.level != "good"


def test_time_without_cpu_that_nobody_explains_is_not_green() -> None:
    result = said(on(run_of(), computed=0.14, waited=None, got=0.14, others=1.8))
    assert result.first.key == "cannot_tell" and "14 %" in result.first.summary
    busy = said(on(run_of(), computed=0.97, waited=None, got=1.0, others=0.1))
    assert busy.first.key == "healthy"


def test_a_quota_that_runs_out_is_named() -> None:
    first = said(on(run_of(), **BUSY | {"others": 0.0, "throttled": 0.8, "cores": 8, "quota": 1.5})).first
    assert first.key == "cpu_shared"
    assert "it may use 1.5 cores" in first.summary and "80 % of the periods" in first.summary


def test_compute_threads_that_wait_for_a_core_are_to_be_fewer() -> None:
    starved = on(run_of(), threads=2, **BUSY | {"pool_waiting": 0.7})
    first = said(starved).first
    assert first.key == "cpu_shared" and first.settings == (("compute_threads", "1"),)
    assert "one thread" in first.cure
    hidden = said(on(run_of(), threads=2, **QUIET | {"others": 1.0, "pool_waiting": 0.9})).first
    assert hidden.key == "cpu_shared"  # its other thread alone has no core


def test_threads_that_hardly_compute_are_not_to_be_fewer() -> None:
    """The step waits for data: its compute threads lose next to nothing."""
    readings = BUSY | {"computed": 0.05, "waited": 0.2, "pool_waiting": 0.9}
    first = said(on(run_of(), threads=2, data_wait=0.799, **readings)).first
    assert first.key == "cpu_shared" and first.settings == ()
    assert "compute threads" not in first.evidence[0].words and "one thread" not in first.cure


def test_first_figure_and_saving_are_one_figure() -> None:
    """With compute threads that wait as well, both name the sum, and the figure says who waited."""
    first = said(on(run_of(), threads=2, **BUSY | {"pool_waiting": 0.7})).first
    figure, saving = first.evidence[0].words, first.recoverable_us_per_step
    assert saving is not None and figure.startswith(f"for {duration(saving)} of every")
    assert "for its own thread" in figure and "for its other compute threads" in figure
    alone = said(on(run_of(), **BUSY)).first.evidence[0].words
    assert alone.endswith("no processor core was free")


def test_more_threads_than_cores_are_the_programs_own() -> None:
    crowd = QUIET | {"computed": 0.5, "waited": 0.5, "got": 1.9, "workers_waiting": 1.5}
    result = said(on(run_of(workers=4), threads=2, **crowd))
    assert result.of("cpu_shared") is None
    assert result.first.key == "cpu_oversubscribed" and result.first.settings == (("compute_threads", "1"),)


def test_waiting_for_a_core_is_no_work_for_the_processor() -> None:
    """31.2 ms to make a batch, of which 69 % had no core."""
    run = run_of(wait=0.9)
    context = on(run, inside(transform_ms=31.2, core_wait=0.69), **BUSY)
    result = said(replace(context, facts=replace(context.facts, breakdown=None)))
    assert result.first.key == "cpu_shared"
    loading = result.of("cpu_preprocessing")
    assert loading is not None
    assert "31 % of the loading time is work for the processor" in loading.summary
    assert "69 % of the loading time no processor core was free" in loading.summary


PERCENT = re.compile(r"(-?\d[\d,]*(?:\.\d+)?) %")
fractions = st.floats(0, 1)
part_ns = st.sampled_from([0, 50, 20_000, 3 * 10**6, 40 * 10**6])


@st.composite
def batches(draw: st.DrawFn, run: Run) -> Batches:
    """One for each step, of parts whose CPU time and wait for a core know nothing of each other."""
    n = len(run.steps)

    def column(strategy: st.SearchStrategy[int]) -> Any:
        few = draw(st.lists(strategy, min_size=3, max_size=3))
        return np.array(few * n, np.int64)[:n]

    walls = [column(part_ns) for _ in range(3)]
    shares = [draw(fractions) for _ in range(3)]
    cpu = [(wall * share).astype(np.int64) for wall, share in zip(walls, shares, strict=True)]
    end = run.steps.start_ns + run.steps.data_wait_ns
    start = end - sum(walls) - column(st.sampled_from([0, 500]))
    item_count = column(st.integers(1, 64))
    core = column(st.sampled_from([-1, 0, 100, 10**6, 10**9]))
    worker, pin = np.full(n, -1, np.int32), np.zeros(n, np.int64)
    asked = run.steps.start_ns
    rows = (worker, start, end, *walls, *cpu, item_count, core, asked, end, pin)
    return Batches(*rows)


@settings(max_examples=60, deadline=None)
@given(st.data(), fractions, fractions, st.floats(0, 2), st.floats(0, 2), fractions)
def test_no_share_is_outside_0_to_100(
    data: st.DataObject, computed: float, waited: float, others: float, pool: float, wait: float
) -> None:
    run = run_of(wait=wait)
    timed = replace(run, batches=data.draw(batches(run)))
    readings = {"computed": computed, "waited": waited, "got": computed, "others": others, "pool_waiting": pool}
    context = on(timed, loading(timed), data.draw(st.integers(1, 4)), **readings)
    result = said(context)
    texts = [text for f in result.findings for text in (f.summary, f.cure, *(e.words for e in f.evidence))]
    for text in texts:
        for share in PERCENT.findall(text):
            assert 0 <= float(share.replace(",", "")) <= 100, text
    total = result.total_us or 0.0
    assert sum(f.recoverable_us_per_step or 0.0 for f in result.findings) <= total * (1 + 1e-9)
    assert all((f.recoverable_us_per_step or 0.0) >= 0 for f in result.findings)
