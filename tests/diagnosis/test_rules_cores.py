"""Whatever the readings of the processor, shares in sentences are shares, and no time is promised twice."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.cores import core_share
from gpulab.analysis.loader import loading
from gpulab.diagnosis.diagnose import diagnose
from gpulab.run import Batches, Run
from tests.support.core_readings import with_cores
from tests.support.rule_cases import case_of, run_of

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
    measured = with_cores(timed, computed=computed, waited=waited, got=computed, others=others, pool_waiting=pool)
    threads = data.draw(st.integers(1, 4))
    measured = replace(measured, environment=replace(measured.environment, compute_threads=threads))
    share = core_share(measured)
    assert share is not None
    context = case_of(measured, {"core_wait": share.thread_wait_fraction or 0.0}, loading(timed), cores=share)
    result = diagnose(context.facts, context.thresholds)
    texts = [text for f in result.findings for text in (f.summary, f.cure, *(e.words for e in f.evidence))]
    shares = [float(share.replace(",", "")) for text in texts for share in PERCENT.findall(text)]
    assert all(0 <= share <= 100 for share in shares), texts
    times_us = [f.recoverable_us_per_step or 0.0 for f in result.findings]
    assert sum(times_us) <= (result.total_us or 0.0) * (1 + 1e-9) and min(times_us) >= 0
