"""The figures that diagnosis and prediction share: one home, and None where nothing was recorded."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts, in_steps
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import RuleContext
from gpulab.intervals import measure
from gpulab.prediction.step import Baseline
from gpulab.run import Samples, Series, Timeline
from gpulab.thresholds import DEFAULT
from gpulab.timeline.labels import What, kind_of, labels
from gpulab.trace.load import load_run
from tests.support import real_traces, synthetic


def loaded_by(iterator: str, workers: int | None) -> Facts:
    """A run whose trace shows that iterator; `workers`: what the loader says, None for a trace from elsewhere."""
    run = synthetic.gpu_case().run
    assert isinstance(run.timeline, Timeline) and run.loader is not None
    names = tuple(n.replace("_MultiProcessingDataLoaderIter", iterator) for n in run.timeline.names)
    loader = None if workers is None else replace(run.loader, num_workers=workers)
    return facts(replace(run, timeline=replace(run.timeline, names=names), loader=loader))


@pytest.mark.parametrize(
    ("iterator", "workers", "count", "some"),
    [
        ("_MultiProcessingDataLoaderIter", 4, 4, True),
        ("_SingleProcessDataLoaderIter", 0, 0, False),
        ("_SingleProcessDataLoaderIter", None, 0, False),
        ("_MultiProcessingDataLoaderIter", None, None, True),
        ("_IteratorOfALibrary", None, None, None),
    ],
)
def test_findings_and_predictions_agree_on_loader_workers(
    iterator: str, workers: int | None, count: int | None, some: bool | None
) -> None:
    known = loaded_by(iterator, workers)
    assert (known.worker_count, known.has_workers) == (count, some)
    assert Baseline.of(known).workers == count == RuleContext(known, DEFAULT).facts.worker_count


@pytest.mark.parametrize(("name", "some"), [("v100_resnet50_workers0", False), ("v100_resnet50_workers4", True)])
def test_a_real_trace_shows_workers_but_not_how_many(name: str, some: bool) -> None:
    known = facts(load_run(real_traces.path(name)))
    assert known.has_workers is some and known.worker_count == (None if some else 0)
    words = " ".join(e.words for f in diagnose(known).findings for e in f.evidence)
    assert ("worker processes load the data" in words, "(num_workers=0)" in words) == (False, not some)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_profiled_steps_are_told_alike_in_all_their_forms(name: str) -> None:
    account = synthetic.cases()[name].facts.breakdown
    assert account is not None and account.step_host_windows is not None
    assert account.wall_ns == sum(sum(step.parts_ns.values()) for step in account.steps) == measure(account.covered)
    assert account.span_ns == (account.covered[0, 0], account.covered[-1, 1])
    assert account.mean_step_us == pytest.approx(account.wall_ns / len(account.steps) / 1e3)
    assert measure(account.host_covered) == sum(end - start for start, end in account.step_host_windows.tolist())


def test_a_window_that_stands_as_one_has_no_steps() -> None:
    account = synthetic.cases()["gpu"].facts.breakdown
    assert account is not None
    as_one = replace(account, whole_window=True)
    assert as_one.step_host_windows is None and len(as_one.host_windows) == len(account.steps)
    without = replace(account, steps=())
    assert without.mean_step_us is None and not len(without.covered) and without.step_host_windows is None


def test_the_typical_step_is_unprofiled_where_there_is_one() -> None:
    known = synthetic.cases()["gpu"].facts
    assert known.step_us is not None and known.traced_step_us is not None and known.data_wait_us is not None
    assert known.typical_step_us is known.step_us
    assert known.data_wait_fraction == known.data_wait_us.median / known.step_us.median
    profiled = replace(known, step_us=None)
    assert profiled.typical_step_us is known.traced_step_us
    nothing = replace(profiled, traced_step_us=None)
    assert nothing.typical_step_us is None and nothing.data_wait_fraction is None
    assert RuleContext(nothing, DEFAULT).step_us == (
        known.breakdown.mean_step_us if known.breakdown is not None else None
    )


def test_labels_are_made_once_for_each_timeline_and_go_with_it() -> None:
    cpu, gpu = (synthetic.cases()[name].facts.run.timeline for name in ("cpu", "gpu"))
    assert cpu is not None and gpu is not None
    for timeline in (cpu, gpu, replace(cpu, names=tuple(reversed(cpu.names))), cpu):
        spans = labels(timeline)
        names = [timeline.names[i] for i in timeline.name_id.tolist()]
        pairs = zip(timeline.category.tolist(), names, strict=True)
        unnamed = {What.CALL: What.LAUNCH}
        expected = [{kind, unnamed.get(kind, kind)} for kind in (kind_of(*pair) for pair in pairs)]
        assert all(what in kinds for what, kinds in zip(spans.what.tolist(), expected, strict=True))
        assert labels(timeline) is spans and labels(spans) is spans
    gone = replace(cpu)
    made = weakref.ref(labels(gone))
    del gone
    gc.collect()
    assert made() is None


STEPS = synthetic.gpu_case().run.steps


@given(st.sets(st.integers(0, int(STEPS.end_ns[-1]) + 10**7), min_size=1), st.sets(st.integers(0, len(STEPS) - 1)))
def test_a_reading_is_of_the_steps_that_hold_its_interval(times: set[int], counted: set[int]) -> None:
    run, t = synthetic.gpu_case().run, sorted(times)
    series = Series("power_w", "W", "power", "test", np.array(t), np.arange(len(t), dtype=np.float64))

    def step_of(time: int) -> int | None:
        return next((i for i in sorted(counted) if STEPS.start_ns[i] <= time < STEPS.end_ns[i]), None)

    def is_inside(begin: int, end: int) -> bool:
        first, last = step_of(begin), step_of(end)
        return first is not None and last is not None and set(range(first, last + 1)) <= counted

    expected = [float(i) for i in range(1, len(t)) if is_inside(t[i - 1], t[i])]
    assert in_steps(run, series, np.array(sorted(counted), np.int64)).tolist() == expected


def test_compiling_says_nothing_of_how_far_steps_fill_the_gpu() -> None:
    """As on an H100: 25 s of compiling, then steps that keep 91 % of the SMs active."""
    run = synthetic.gpu_case().run
    t = np.arange(0, run.wall_ns, 5_000_000)
    first = int(run.steps.start_ns[5])
    active = Series("sm_active_fraction", "", "SM activity", "NVML GPM", t, np.where(t < first, 0.0, 0.91))
    late = np.concatenate((np.linspace(-(10**9), -1, 999).astype(np.int64), t))
    longer = replace(active, t_ns=late, value=np.concatenate((np.zeros(999), active.value)))
    (curve,) = facts(replace(run, samples=Samples((longer,)))).curves
    assert curve.mean < 0.2 and curve.step_mean == pytest.approx(0.91, abs=0.02)
