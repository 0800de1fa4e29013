"""Predictions against formulas written out by hand, real traces with a known cure, and their own limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import gpulab
from gpulab.analysis import device_peaks
from gpulab.analysis.blocking_calls import blocking_calls
from gpulab.analysis.device_peaks import peaks_of
from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.loader import LoadingFacts
from gpulab.analysis.operators import HostOperators
from gpulab.analysis.optimizer_work import OptimizerWork
from gpulab.analysis.steps import Spread
from gpulab.api.runs import Runs
from gpulab.diagnosis import idle_gpu, operations
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import diagnose, with_predictions
from gpulab.diagnosis.finding import Finding, RuleContext, Undetermined
from gpulab.errors import UsageError
from gpulab.intervals import EMPTY, joined, union, union_of
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.knob import setting_text
from gpulab.prediction.batches import fitted
from gpulab.prediction.predict import PREDICTORS, Predictor, _telling, predict
from gpulab.prediction.prediction import Prediction, PriorEvidence
from gpulab.run import Memory, Pause, PauseKind, StepFlag
from gpulab.store.folders import Store
from gpulab.thresholds import DEFAULT
from gpulab.trace.load import load_run
from gpulab.tuning.arms import sizes_to_run
from gpulab.views.predictions import Predicted
from tests.support import comparisons as made
from tests.support import loops as made_loops
from tests.support import real_traces, synthetic
from tests.support.core_readings import with_cores

LOADED = LoadingFacts(30, 30, 32.0, 0.0, 0.0, 0.0, 0.0, None, None, None, None, None, ())


def fed(
    step_ms: float = 40.0, wait: float = 0.5, *, cores: float = 8.0, workers: int = 0, length: int | None = None
) -> Facts:
    """A run on a CPU that waits for that share of each step. `length`: batches of an epoch, known or not."""
    known = made.facts_with(step_ms, {"data_wait": wait, "compute": 1 - wait}, workers=workers)
    assert known.run.loader is not None
    run = replace(
        known.run,
        environment=replace(known.run.environment, usable_cores=cores, platform="Linux-6", python="3.12.1"),
        samples=replace(known.run.samples, series=()),
        memory=Memory(peak_rss_bytes=2_000_000_000),
        loader=replace(known.run.loader, length=length, own_collate=False),
    )
    return replace(known, run=run)


def timed(known: Facts, *, batch_ms: float, read_ms: float, waited: float = 0.0, workers: int = 0) -> Facts:
    """The same with its batches timed where they are made: what is not reading is collating."""
    inside = replace(
        LOADED,
        batch_us=batch_ms * 1e3,
        read_us=read_ms * 1e3,
        collate_us=(batch_ms - read_ms) * 1e3,
        read_waited_fraction=waited,
    )
    return replace(known, loading=inside)


def ratio_of(known: Facts, **settings: object) -> float:
    found = predict(known, {name: setting_text(value) for name, value in settings.items()})
    assert found.ratio is not None and found.interval is not None, found.refused
    assert found.interval[0] <= found.ratio <= found.interval[1]
    assert found.basis
    return found.ratio


def interval_of(known: Facts, prior: PriorEvidence | None = None, **settings: Any) -> tuple[float, float]:
    found = predict(known, {name: setting_text(value) for name, value in settings.items()}, prior or PriorEvidence())
    assert found.interval is not None, found.refused
    return found.interval


def width_of(known: Facts, **settings: Any) -> float:
    """How many times the upper end of the interval is the lower one."""
    low, high = interval_of(known, **settings)
    return high / low


def loading(known: Facts, **changes: Any) -> Facts:
    """The same with other figures of the loader."""
    assert known.loading is not None
    return replace(known, loading=replace(known.loading, **changes))


# every knob


def test_only_knobs_have_a_formula_or_a_reason() -> None:
    assert set(PREDICTORS) <= set(KNOBS)
    assert all(formula.strip() for formula in PREDICTORS.values() if isinstance(formula, str))


@pytest.mark.parametrize("case", synthetic.cases())
def test_whatever_the_run_the_answer_is_a_figure_or_a_reason(case: str) -> None:
    known, sizes = synthetic.cases()[case].facts, PriorEvidence(sizes={8: (100.0, None), 16: (150.0, 5)})
    for name, value in ((n, v) for n in KNOBS for v in (*KNOBS[n].options, 0, 3, "nonsense")):
        made_of_it = predict(known, {name: setting_text(value)}, sizes)
        if made_of_it.refused:
            assert made_of_it.ratio is None and made_of_it.interval is None
            assert not made_of_it.refused.endswith(".")
        else:
            assert made_of_it.ratio is not None and made_of_it.interval is not None
            assert 0 < made_of_it.interval[0] <= made_of_it.ratio <= made_of_it.interval[1] < np.inf


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"amp": "bf16"}, "CPU"),
        ({"tf32": "on"}, "NVIDIA"),
        ({"hidden": "64"}, "hidden"),
        ({"workers": "many"}, "no value"),
        ({}, "nothing is changed"),
        *(({n: v}, "nothing changes: ") for n, v in (("workers", "0"), ("batch_size", "32"), ("cache", "off"))),
    ],
)
def test_what_the_evidence_does_not_carry_is_refused(settings: dict[str, str], why: str) -> None:
    found = predict(fed(), settings)
    assert found.ratio is None and why in found.refused
    assert found.settings == settings
    assert "no complete step" in predict(synthetic.no_step_case().facts, settings or {"workers": "2"}).refused


@pytest.mark.parametrize("settings", [{"accumulate": "4"}, {"compile": "default"}, {"workers": "8", "accumulate": "2"}])
def test_that_memory_is_not_foretold_is_said(settings: dict[str, str]) -> None:
    known = facts(synthetic.gpu_case().run)
    found = predict(known, settings)
    assert found.ratio is not None, found.refused
    assert found.memory_ratio is None and "memory is not predicted" in found.memory_basis
    shown = repr(Predicted("mine", (found,)))
    assert "memory is not predicted" in " ".join(shown.split())
    alone = predict(known, {"workers": "8"})
    assert alone.memory_ratio == 1 and alone.memory_basis
    assert "memory stays" in repr(Predicted("mine", (alone,))) and "today's peak" not in repr(Predicted("", (alone,)))
    assert not predict(fed(), {"workers": "2"}).memory_basis


# feeding


@hypothesis.settings(max_examples=40)
@given(
    st.floats(5, 200), st.floats(0.05, 0.9), st.integers(1, 16), st.floats(1, 32), st.floats(0, 1), st.integers(0, 40)
)
def test_workers_against_the_formula(
    step_ms: float, wait: float, workers: int, cores: float, waited: float, tensors: int
) -> None:
    known = fed(step_ms, wait, cores=cores)
    loader = replace(known.run.loader, batch_tensors=tensors)  # type: ignore[type-var]
    known = replace(known, run=replace(known.run, loader=loader))
    assert known.step_us is not None and known.data_wait_us is not None
    step, making = known.step_us.median, known.data_wait_us.median
    computing = step - making
    known = timed(known, batch_ms=making / 1e3, read_ms=making / 1e3, waited=waited)
    cpu, receiving = making * (1 - waited), 500 + tensors * 650
    least = (computing + receiving, making / workers, cpu / min(workers, cores))
    expected = max(*least, (cpu + computing) / cores)
    found = predict(known, {"workers": str(workers)})
    if found.ratio is not None:
        assert found.ratio == pytest.approx(expected / step, rel=1e-3)
    else:
        assert found.refused.startswith("try it"), "its range reaches both sides"
        assert 0.4 < expected / step < 2.5


def test_what_is_not_known_of_the_items_widens_the_interval() -> None:
    known = timed(fed(40, 0.8, cores=2), batch_ms=32, read_ms=32, waited=0.0)
    assert width_of(fed(40, 0.8, cores=2), workers=4) > 1.3 * width_of(known, workers=4)
    here = timed(fed(20, 0.5, cores=8), batch_ms=10, read_ms=10)
    assert width_of(here, workers=4) > 1.2 * width_of(loading(here, hand_over_us=1_800.0), workers=4)


@pytest.mark.parametrize(
    ("known", "settings", "after_ms", "rel"),
    [
        (timed(fed(20, 0.0, workers=2), batch_ms=30, read_ms=25), {"workers": 0}, 20 + 30, 0.05),
        (fed(60, 0.5, workers=1), {"workers": 2}, 30 + 2, 0.15),  # a loop that waits tells the workers' pace
        (timed(fed(40, 0.5), batch_ms=20, read_ms=17), {"cache": True}, 20 + 3, 0.03),  # the rest is put together anew
    ],
)
def test_what_the_loader_takes_afterwards(
    known: Facts, settings: dict[str, object], after_ms: float, rel: float
) -> None:
    assert known.step_us is not None
    assert ratio_of(known, **settings) * known.step_us.median / 1e3 == pytest.approx(after_ms, rel=rel)
    filled = predict(timed(fed(40, 0.5), batch_ms=20, read_ms=17), {"cache": "on"})
    assert filled.setup_s == pytest.approx(0.017 / 32 * 1797) and "filling takes about 955 ms once" in filled.basis
    assert "not measured" in predict(fed(20, 0.01, workers=4), {"workers": "0"}).refused, "no wait, and not timed"


def test_putting_together_needs_a_core() -> None:
    known = timed(fed(40, 0.8, cores=2), batch_ms=32, read_ms=0)
    collating = loading(known, read_waited_fraction=None)
    reading = loading(collating, read_us=32_000.0, collate_us=0.0)
    assert ratio_of(collating, workers=4) == pytest.approx(ratio_of(known, workers=4))
    assert interval_of(collating, workers=4)[0] > 1.3 * interval_of(reading, workers=4)[0]


def test_workers_started_each_epoch_cost_start_and_first_batch() -> None:
    endless = timed(fed(40, 0.8), batch_ms=32, read_ms=32)
    anew = timed(fed(40, 0.8, length=20), batch_ms=32, read_ms=32)
    starting_ms = 28 + 4 * 16
    more = ratio_of(anew, workers=4) - ratio_of(endless, workers=4)
    assert more == pytest.approx((starting_ms + 32) / 20 / 40, rel=0.02)
    kept = predict(anew, {"workers": "4", "persistent_workers": "on"})
    assert kept.ratio == pytest.approx(ratio_of(endless, workers=4) + 32 / 20 / 40, rel=0.02)
    narrow, wide = (predict(k, {"workers": "4"}).interval for k in (endless, anew))
    assert narrow is not None and wide is not None
    assert wide[1] - wide[0] > narrow[1] - narrow[0] + starting_ms / 20 / 40
    spawned = replace(anew.run.environment, platform="macOS-15")
    slow = replace(anew, run=replace(anew.run, environment=spawned))
    assert ratio_of(slow, workers=4) == pytest.approx(ratio_of(endless, workers=4) + (2000 + 32) / 20 / 40, rel=1e-3)
    seldom = predict(timed(fed(40, 0.8, length=60), batch_ms=32, read_ms=32), {"workers": "4"})
    assert seldom.ratio == ratio_of(endless, workers=4), "in long epochs a typical step knows nothing of their start"
    assert seldom.interval is not None and seldom.interval[1] > narrow[1] + (starting_ms + 32) / 60 / 40


def test_persistent_workers_save_the_start_not_the_first_batch() -> None:
    known = timed(fed(10, 0.1, workers=2, length=20), batch_ms=5, read_ms=5)
    late = epochs_begin_late(known, every=20, late_ms=100)
    found = predict(late, {"persistent_workers": "on"})
    assert found.interval is not None and not found.only_sign
    assert found.ratio == pytest.approx(1 - (100 - 5 - 2) / (20 * 10 + 100), rel=0.02)
    assert found.ratio is not None and found.interval[0] < found.ratio < found.interval[1] < 0.9
    untimed = predict(replace(late, loading=None), {"persistent_workers": "on"})
    assert untimed.only_sign and untimed.interval is not None
    assert untimed.interval[0] <= 1 - 100 / 300 and untimed.interval[1] >= 1.0
    saved = tuple(
        Pause("checkpoint_save", start, start + 40_000_000)
        for start in (late.run.steps.start_ns[20::20] - 60_000_000).tolist()
    )
    told = replace(late, run=replace(late.run, pauses=saved))
    less = predict(told, {"persistent_workers": "on"}).ratio
    assert less == pytest.approx(1 - (60 - 5 - 2) / (20 * 10 + 60), rel=0.02)


def epochs_begin_late(known: Facts, *, every: int, late_ms: float) -> Facts:
    """The same with so much more time before each `every`th step, which begins an epoch."""
    steps, run = known.run.steps, known.run
    number = np.arange(len(steps))
    shift = (number // every * late_ms * 1e6).astype(np.int64)
    flags = np.where((number % every == 0) & (number > 0), steps.flags | StepFlag.EPOCH_START, steps.flags)
    moved = replace(
        steps, start_ns=steps.start_ns + shift, end_ns=steps.end_ns + shift, flags=flags.astype(steps.flags.dtype)
    )
    return replace(known, run=replace(run, steps=moved))


def test_on_a_gpu_unknown_items_widen_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.prediction.predict.CLEARLY", np.inf)  # also where it says nothing
    monkeypatch.setattr("gpulab.prediction.predict.WIDEST", np.inf)
    known = synthetic.gpu_case().facts
    environment = replace(known.run.environment, usable_cores=3.0)
    known = timed(replace(known, run=replace(known.run, environment=environment)), batch_ms=48, read_ms=48)
    waiting, busy, unknown = (
        interval_of(loading(known, read_waited_fraction=waited), workers=16) for waited in (1.0, 0.0, None)
    )
    assert busy[1] > 1.1 * waiting[1] and unknown == pytest.approx((waiting[0], busy[1]))


def test_settings_in_any_order_and_idle_ones_beside_them() -> None:
    known = timed(fed(40, 0.5, cores=4), batch_ms=20, read_ms=17)
    sizes = PriorEvidence(sizes={32: (40e3, None), 64: (70e3, None)})
    one = predict(known, {"workers": "2", "cache": "on", "batch_size": "128"}, sizes)
    other = predict(known, {"batch_size": "128", "cache": "on", "workers": "2"}, sizes)
    assert one.ratio == other.ratio and one.interval == other.interval
    assert interval_of(known, workers=2, cache=False) == interval_of(known, workers=2)


# batch


@given(
    st.lists(st.integers(1, 512), min_size=2, max_size=3, unique=True),
    st.floats(0, 1e5),
    st.floats(0.1, 1e3),
    st.integers(1, 1024),
)
def test_a_straight_line_is_found_again(sizes: list[int], a: float, b: float, asked: int) -> None:
    line = fitted({size: a + b * size for size in sizes})
    assert line.at(asked) == pytest.approx(a + b * asked, rel=1e-3, abs=1e-3 * (a + b * max(sizes)))


def test_a_step_below_its_floor() -> None:
    line = fitted({8: 100.0, 64: 164.0, 128: 228.0 + 64.0})
    assert line.at(8) == pytest.approx(100.0) and line.at(4) == pytest.approx(100.0)
    assert line.at(256) == pytest.approx(548.0)


def test_a_larger_batch_from_short_runs() -> None:
    known = fed(40, 0.1)
    short = PriorEvidence(sizes={16: (30e3, 1_000), 32: (40e3, 1_500), 45: (48e3, None)})
    found = predict(known, {"batch_size": "64"}, short)
    assert found.ratio == pytest.approx((20 + 0.625 * 64) / 40 / 2, rel=0.02)
    on_gpu = facts(synthetic.gpu_case().run)
    settings, as_written = {"batch_size": "512"}, {"batch_size": "256"}
    short = PriorEvidence(sizes={128: (9e3, 800), 256: (12e3, 1_500), 300: (13e3, None)}, values_before=as_written)
    told = predict(on_gpu, settings, short)
    assert told.memory_ratio == pytest.approx(2_900 / 1_500, rel=1e-3) and "peaks of short runs" in told.memory_basis
    assert "1.9× today's peak of the GPU's memory" in " ".join(repr(Predicted("mine", (told,))).split())
    beside = predict(on_gpu, {**settings, "accumulate": "2"}, short)
    assert beside.ratio is not None
    assert beside.memory_ratio is None


def test_far_beyond_the_sizes_run_the_range_is_wide() -> None:
    """Steps of 4 and 8 samples took 4.7 and 4.2 ms; what 128 to 512 samples gave was measured on that cell."""
    few = of_sizes(4, {4: 4_700.0, 8: 4_200.0})
    for size, measured in ((128, 8.4), (256, 14.0), (512, 18.0)):
        low, high = interval_of(fed(4.7, 0.0), few, batch_size=size)
        assert 1.25 < 1 / high < measured < 1 / low, "it is certain that a larger batch helps"
    assert predict(fed(4.7, 0.0), {"batch_size": "128"}, few).only_sign
    low, high = interval_of(fed(40, 0.0), of_sizes(32, {32: 40e3, 64: 52e3}), batch_size=128)
    assert high / low < 1.8


@given(
    before=st.integers(1, 64),
    fixed_us=st.floats(100, 1e5),
    each_us=st.floats(0.1, 1e4),
    doublings=st.integers(1, 8),
    off=st.tuples(st.floats(0.97, 1.03), st.floats(0.97, 1.03)),
)
@hypothesis.settings(deadline=None)
def test_what_a_true_line_gives_lies_in_the_range(
    before: int, fixed_us: float, each_us: float, doublings: int, off: tuple[float, float]
) -> None:
    """Of a step of a + b·B whose two short runs are each off by up to 3 %."""
    size = before * 2**doublings
    true = {each: fixed_us + each_us * each for each in (before, 2 * before, size)}
    sizes = {before: true[before] * off[0], 2 * before: true[2 * before] * off[1]}
    found = predict(fed(40, 0.0), {"batch_size": str(size)}, of_sizes(before, sizes))
    if found.interval is not None:
        expected = true[size] / true[before] / 2**doublings
        assert found.interval[0] <= expected <= found.interval[1]


def of_sizes(before: int, times_us: dict[int, float]) -> PriorEvidence:
    sizes = {size: (us, None) for size, us in times_us.items()}
    return PriorEvidence(sizes=sizes, values_before={"batch_size": str(before)})


# what says nothing


def test_a_range_on_both_sides_is_refused() -> None:
    """Between clearly slower and clearly faster: any measurement would have fitted."""
    known = calling(0.0)
    unknown = replace(known.typical_step_us, p10=1e3, p90=4e5, count=1)  # type: ignore[type-var]
    found = predict(replace(timed(known, batch_ms=1, read_ms=1), step_us=unknown), {"cache": "on"})
    assert found.ratio is None and "too wide" in found.refused, found


@pytest.mark.parametrize(
    ("interval", "says_something"),
    [((0.16, 1.11), False), ((0.5, 1.1), True), ((0.1, 0.9), True), ((0.9, 1.05), True), ((0.7, 1.4), False)],
)
def test_a_wide_range_that_holds_the_speed_of_now_is_refused(
    interval: tuple[float, float], says_something: bool
) -> None:
    found = _telling(Prediction({"batch_size": "128"}, 0.4, interval, "it"))
    assert (found.interval is not None) is says_something
    assert says_something or "too wide" in found.refused


def test_workers_beside_other_programs_may_be_slower() -> None:
    """Half of the making waited for a core in this run: workers may wait for one as well."""
    known = timed(fed(40, 0.8, cores=8), batch_ms=32, read_ms=32)
    crowded = loading(known, core_wait_fraction=0.5)
    assert width_of(crowded, workers=2) > 1.2 * width_of(known, workers=2)
    alone, beside = (predict(facts, {"workers": "2"}).basis for facts in (known, crowded))
    assert alone.startswith("Loading a batch takes 32.0 ms,")
    assert beside.startswith("Loading a batch takes 16.0 ms on a free core")


def test_a_batch_from_one_run_is_a_range_that_knows_starving() -> None:
    computing, starving = (interval_of(fed(40, wait), batch_size=128) for wait in (0.0, 0.9))
    assert predict(fed(40, 0.9), {"batch_size": "128"}).only_sign
    assert computing[0] == pytest.approx(0.25, rel=0.1)
    assert starving[0] > 0.85, "loading each sample takes what it takes"


def calling(share: float) -> Facts:
    """Steps on a CPU of which so much goes to calling operators."""
    return replace(fed(40, 0.0), host=HostOperators(900, 850, 0.0, share, 0.0, 0.0, 0.0, None), optimizer_us=None)


def test_with_many_calls_one_cpu_run_predicts_a_larger_batch() -> None:
    known = calling(0.8)
    assert ratio_of(known, batch_size=128) == pytest.approx(0.04 + 0.96 / 4, rel=1e-3)
    found = predict(known, {"batch_size": "64"})
    assert not found.only_sign and found.interval is not None
    assert found.interval[0] < 0.5 and found.interval[1] == pytest.approx(0.3 + 0.7 / 2, rel=0.1)
    updating = replace(known, optimizer_us=Spread(20e3, 20e3, 20e3, 8))
    assert ratio_of(updating, batch_size=64) == pytest.approx(0.01 + 0.99 / 2, rel=1e-3)
    assert predict(calling(0.4), {"batch_size": "128"}).only_sign
    work = OptimizerWork("AdamW", "fused", 1, 0, 0, 0, 0, 0, 0, 0, 0, True, 0, EMPTY, EMPTY)
    fused = replace(calling(0.1), optimizer_us=Spread(16e3, 16e3, 16e3, 8), optimizer=work)
    fixed = 1 - (0.9 * (1 - 0.4 * 44 / 28)) ** 2
    assert ratio_of(fused, batch_size=64) == pytest.approx(fixed / 2 + 1 - fixed, rel=1e-3), "parameters are read, too"
    assert predict(replace(fused, optimizer=None), {"batch_size": "64"}).only_sign


@given(st.integers(1, 4096), st.lists(st.integers(1, 4096), min_size=1, max_size=4))
def test_sizes_that_are_run_are_none_that_is_foretold(before: int, targets: list[int]) -> None:
    hypothesis.assume(before not in targets)
    found = sizes_to_run(before, targets)
    assert not set(found) & set(targets)
    assert found == sorted(set(found)) and min(found) >= 1
    assert max(found) <= max(before, *targets)


# the optimizer, seen in a real run on this machine


@pytest.fixture(scope="module")
def trained() -> dict[str, Facts]:
    torch = pytest.importorskip("torch")
    found = {}
    for name in ("AdamW", "SGD"):
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-4)
        with gpulab.profile(show=False, save=False, live=False, steps=14) as profiled:
            for _ in range(20):
                model(torch.zeros(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = facts(profiled.run)
    return found


def lasting(known: Facts, step_us: float, optimizer_us: float) -> Facts:
    """The same, whose steps and updates took so long."""
    whole, part = Spread(step_us, step_us, step_us, 20), Spread(optimizer_us, optimizer_us, optimizer_us, 20)
    return replace(known, step_us=whole, optimizer_us=part)


def test_updates_save_at_most_themselves(trained: dict[str, Facts]) -> None:
    known = trained["AdamW"]
    for share in (0.1, 0.5, 0.9):  # of times that a busy machine cannot change
        ratio = ratio_of(lasting(known, 900e3, share * 900e3), fused_optimizer=True)
        assert 1 - share - 1e-9 < ratio <= 1 + 1e-9
    assert "nothing changes" in predict(known, {"fused_optimizer": "off"}).refused
    half = lasting(known, 900e3, 450e3)
    assert 0.5 < ratio_of(half, fused_optimizer=True) < 0.75
    for rounds in (2, 4, 8):
        assert ratio_of(half, accumulate=rounds) >= 1 - 0.5 * (1 - 1 / rounds)
    assert ratio_of(half, accumulate=8) < ratio_of(half, accumulate=2) < 1


@pytest.mark.parametrize(("longer_us", "moved_us"), [(0.0, 0.0), (100.0, 23 * 100.0 / 2)])
def test_a_fused_step_begins_once(trained: dict[str, Facts], longer_us: float, moved_us: float) -> None:
    known = passing(trained["AdamW"], "aten::mul_", 3.0 + longer_us)
    timeline = known.run.timeline
    assert timeline is not None
    mul = np.flatnonzero(timeline.name_id == timeline.names.index("aten::mul_"))
    duration_ns = timeline.duration_ns.copy()
    duration_ns[mul[:: len(mul) // len(np.unique(known.run.traced_numbers))]] = 3_000  # of 24 in a step, two a tensor
    run = replace(known.run, timeline=replace(timeline, duration_ns=duration_ns))
    after_us = 10e3 * ratio_of(lasting(replace(known, run=run), 10e3, 10e3), fused_optimizer=True)
    assert after_us == pytest.approx(60 + 1.5 * 12 + 3.5 * moved_us, rel=0.01)


def passing(known: Facts, operator: str, us: float) -> Facts:
    """The same, where each such operator took so long: what else runs on a machine makes real ones longer."""
    timeline = known.run.timeline
    assert timeline is not None
    its = timeline.name_id == timeline.names.index(operator)
    timed = replace(timeline, duration_ns=np.where(its, int(us * 1e3), timeline.duration_ns))
    return replace(known, run=replace(known.run, timeline=timed))


def test_a_plain_optimizer_has_little_to_save(trained: dict[str, Facts]) -> None:
    def ratio(name: str, operator: str, us: float) -> float:
        """Of a step of a millisecond, in which the updates of 12 small tensors take so long."""
        return ratio_of(lasting(passing(trained[name], operator, 5.0), 1e3, us), fused_optimizer=True)

    assert ratio("SGD", "aten::add_", 60.0) == pytest.approx(1, abs=0.01)
    assert ratio("AdamW", "aten::mul_", 600.0) < 0.9


# compiling


def test_what_only_a_run_shows_is_to_be_tried() -> None:
    on_gpu = synthetic.gpu_case().facts
    for known in (fed(), on_gpu):
        for settings in ({"prefetch": "4"}, {"pin_memory": "on"}, {"channels_last": "on"}):
            assert predict(known, settings).refused.startswith("try it: ")
    assert predict(fed(), {"compile": "default"}).refused.startswith("try it: ")
    assert predict(on_gpu, {"compile": "default"}).only_sign


# leaving something out


def without(known: Facts, key: str) -> Prediction:
    """What that finding's cause would bring, left out wherever the run shows it."""
    removal = kind_of(key).removal
    assert removal is not None
    if removal == "pauses":
        kinds = ("gc",) if key == "gc_pause" else (key,)
        times = union_of((p.start_ns, p.end_ns) for p in known.run.pauses if p.kind in kinds)
    else:
        directions = ("upload",) if key == "blocking_copy" else ("read", "wait")
        times = joined(*(b.times for b in known.of(blocking_calls) if b.direction in directions))
    return Predictor(known).without(removal, times)


def test_pauses_are_taken_off_the_account() -> None:
    known = fed(40, 0.2)
    steps, rows = known.run.steps, known.selection.rows
    pauses = tuple(
        Pause("checkpoint_save", int(steps.start_ns[i]), int(steps.start_ns[i]) + 8_000_000) for i in rows[::4].tolist()
    )
    run = replace(known.run, pauses=(*pauses, Pause("gc", int(steps.start_ns[0]), int(steps.end_ns[0]))))
    known = replace(known, run=run)
    found = without(known, "checkpoint_save")
    following = np.minimum(rows + 1, len(steps) - 1)
    ends = np.where(following > rows, steps.start_ns[following], steps.end_ns[rows])
    whole = int((ends - steps.start_ns[rows]).sum())
    assert found.ratio == pytest.approx(1 - 1.1 * 8e6 * len(pauses) / whole)  # and a tenth for caches
    assert found.ratio is not None and found.interval is not None
    assert found.interval[0] < found.ratio < found.interval[1]
    assert found.settings == {}
    given_alone = np.array([(p.start_ns, p.end_ns) for p in pauses], np.int64)
    assert Predictor(known).without("pauses", union(*given_alone.T)) == found


def test_nothing_to_leave_out_is_refused() -> None:
    for known, key, words in (
        (fed(), "gc_pause", "when exactly"),
        (synthetic.cpu_case().facts, "sync_points", "when exactly"),
    ):
        refused = without(known, key).refused
        assert refused and words in refused


def test_waits_left_out_of_a_real_trace() -> None:
    known = facts(load_run(real_traces.path("v100_resnet50_workers4")))
    found = without(known, "blocking_copy")
    assert found.ratio is not None and 0.85 < found.ratio < 0.97  # 9 ms of 118 to 127


def told_of(known: Facts, key: str) -> Finding:
    """The finding of that key, with its prediction."""
    found = diagnose(known).of(key)
    assert found is not None and found.prediction is not None
    return found


def with_pauses(known: Facts, *pauses: Pause) -> Facts:
    return replace(known, run=replace(known.run, pauses=pauses))


def in_steps(known: Facts, kind: PauseKind, from_ms: float, to_ms: float) -> tuple[Pause, ...]:
    """One at that time in every second step that counts."""
    start = known.run.steps.start_ns[known.selection.rows[::2]].tolist()
    return tuple(Pause(kind, s + int(from_ms * 1e6), s + int(to_ms * 1e6)) for s in start)


def test_leaving_out_one_pause_leaves_the_others() -> None:
    known = fed(40, 0.2)
    logging, evaluation = in_steps(known, "logging", 1, 9), in_steps(known, "evaluation", 12, 34)
    finding = told_of(with_pauses(known, *logging, *evaluation), "logging_or_eval")
    assert "Logging" in finding.summary
    assert finding.prediction == told_of(with_pauses(known, *logging), "logging_or_eval").prediction
    assert finding.predicted_ratio == pytest.approx(1 - 1.1 * 8 / 80, abs=0.005)
    nested = with_pauses(known, *in_steps(known, "checkpoint_save", 10, 20), *in_steps(known, "gc", 4, 18))
    assert told_of(nested, "gc_pause").predicted_ratio == pytest.approx(1 - 1.1 * 6 / 80, abs=0.005)
    assert told_of(nested, "checkpoint_save").predicted_ratio == pytest.approx(1 - 1.1 * 10 / 80, abs=0.005)


def reading_and_uploading() -> Facts:
    """A step in which a batch is copied from ordinary memory, and a result is read."""

    def step(machine: made_loops.Machine) -> None:
        machine.upload(4_000, pinned=False)
        machine.operator("aten::mm", "k", 4_000)
        machine.item()

    return made_loops.loop(step, 1).facts()


@pytest.mark.parametrize(("key", "calls"), [("sync_points", 2), ("blocking_copy", 1)])
def test_only_the_waits_that_a_finding_counts_are_left_out(key: str, calls: int) -> None:
    known = reading_and_uploading()
    assert {b.direction for b in known.of(blocking_calls)} == {"read", "upload"}
    rule = idle_gpu.sync_points if key == "sync_points" else idle_gpu.blocking_copy
    finding = rule(RuleContext(known, DEFAULT))
    assert isinstance(finding, Finding)
    (told,) = with_predictions(known, [replace(finding, settings=())], 12_000.0, PriorEvidence())
    assert told.prediction is not None and f"in {calls} call" in told.prediction.basis
    assert f"in {calls} call" in without(known, key).basis


# real GPUs


def test_workers_for_a_job_whose_cure_is_known() -> None:
    """v100_resnet50_workers0, and the same job with four workers: its steps 2 to 5 took 118 to 127 ms, not 176."""
    known = facts(load_run(real_traces.path("v100_resnet50_workers0")))
    found = predict(known, {"workers": "4"})
    assert found.ratio is not None and found.interval is not None
    assert found.ratio == pytest.approx(120 / 176, rel=0.07)
    assert found.interval[0] < 120 / 176 < found.interval[1]


def test_mixed_precision_bound_by_host_and_by_device() -> None:
    starved = facts(load_run(real_traces.path("v100_resnet50_workers0")))
    bound = facts(load_run(real_traces.path("v100_ddp_healthy")))
    assert predict(starved, {"amp": "fp16"}).ratio == pytest.approx(1, abs=0.03)
    found = predict(bound, {"amp": "fp16"}).ratio
    assert found is not None and 0.2 < found < 0.7
    assert "bf16" in predict(bound, {"amp": "bf16"}).refused  # a V100 has no units for it
    assert "TF32" in predict(bound, {"tf32": "on"}).refused


def test_a_trace_that_hides_what_the_host_waits_for_is_refused() -> None:
    """The host takes as long as the GPU works, and no call of it waits."""

    def step(machine: made_loops.Machine) -> None:
        for _ in range(100):
            machine.operator("aten::mm", "ampere_sgemm_128x64_nn", gpu_us=98, host_us=100)

    known = made_loops.loop(step).facts()
    assert "does not show where" in predict(known, {"amp": "fp16"}).refused


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GeForce RTX 4090", 165.2),
        *((name, None) for name in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GB200", "AMD EPYC", "T400", "")),
    ],
)
def test_peaks_by_the_names_of_drivers(name: str, fp16: float | None) -> None:
    found = peaks_of(name)
    assert (None if found is None else found.fp16_tflops) == fp16


@pytest.mark.parametrize(
    ("name", "capability", "units", "word"),
    [
        ("NVIDIA A40", "8.6", True, "amp=bf16"),
        ("NVIDIA TITAN RTX", "7.5", True, "amp=fp16"),
        ("AMD Instinct MI250X", "9.0", None, "if at all"),
        ("NVIDIA GeForce GTX 1660", "7.5", False, ""),
        ("Tesla P100-PCIE-16GB", "6.0", False, ""),
    ],
)
def test_no_other_gpu_stands_in_for_unknown_peaks(name: str, capability: str, units: bool | None, word: str) -> None:
    case = made_loops.loop(lambda machine: machine.operator("aten::mm", "ampere_sgemm_128x64_nn", gpu_us=900)).case()
    device = replace(case.facts.run.device, name=name, details={"compute_capability": capability})
    assert device_peaks.narrow_ratio(device) is None and device_peaks.tf32_ratio(device) is None
    assert device_peaks.has_units(device) is units
    run = replace(case.facts.run, device=device)
    unknown = RuleContext(replace(case.facts, run=run), DEFAULT)
    answer = operations.no_mixed_precision(unknown)
    assert (
        answer is None
        if units is False
        else isinstance(answer, Undetermined) and word in f"{answer.what} {answer.record}"
    )
    assert operations.no_tf32(unknown) is None


# the door


def test_foretelling_what_was_asked_or_what_the_findings_name() -> None:
    run = fed(40, 0.6).run
    told = gpulab.predict(run, {"workers": 2})
    asked = repr(told)
    assert "speedup" in asked and "%%gpuprofile --ab workers=2" in asked
    hint = f"import gpulab; print(gpulab.predict('{run.name}', settings={{'workers': '2'}}).text(full=True))"
    assert hint in " ".join(told.text().split())
    with pytest.raises(UsageError, match="Unknown setting"):
        gpulab.predict(run, {"wrokers": 2})
    assert "<td" in gpulab.predict(run).fragment() or "No finding" in gpulab.predict(run).fragment()
    none = gpulab.predict(run, {"prefetch": 4, "workers": 2})
    assert none.headline.sentence == "No prediction for prefetch=4, workers=2."
    assert "try it:" not in none.text().lower()
    assert "%%gpuprofile --ab prefetch=4,workers=2" in " ".join(none.text().split())
    of_script = gpulab.predict(replace(run, source="script"), {"prefetch": 4, "workers": 2})
    assert "on your script, without an edit: gpulab record --ab" in " ".join(of_script.text().split())


def test_a_knob_is_asked_of_the_run_as_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a comparison the last run is the one with the knob turned."""
    written_run = replace(fed(40, 0.6).run, id="20260101-000000-aaaaaa")
    settings = replace(written_run.settings, knobs={"workers": "2"})
    turned = replace(fed(30, 0.1, workers=2).run, id="20260101-000001-bbbbbb", settings=settings)
    mine = Runs(Store(tmp_path))
    monkeypatch.setattr("gpulab.api.predict.runs", mine)
    for run in (written_run, turned):
        mine.add(run)
    asked = repr(gpulab.predict(settings={"workers": 2}))
    assert asked == repr(gpulab.predict(written_run, {"workers": 2}))
    assert asked != repr(gpulab.predict(turned, {"workers": 2}))


def test_a_prediction_says_that_its_run_was_disturbed() -> None:
    run = fed(40, 0.5).run
    for others, waited in ((1.7, 0.68), (0.0, 0.0)):
        measured = with_cores(run, computed=1 - waited, waited=waited, got=1 - waited, others=others)
        shown = gpulab.predict(measured, {"workers": 2})
        assert shown.headline.key in ("predicted", "nothing_predicted")
        told = "This run was disturbed: CPU contention" in " ".join(repr(shown).split())
        assert told is (others > 0)
