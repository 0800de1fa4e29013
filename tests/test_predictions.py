"""Predictions against formulas written out by hand, real traces with a known cure, and their own limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import made_comparisons as made
import numpy as np
import pytest
import real_traces
import synthetic
from hypothesis import given
from hypothesis import strategies as st

import gpulab
from gpulab.analysis.device_peaks import peaks_of
from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.loading import LoadingFacts
from gpulab.analysis.steps import Spread
from gpulab.errors import UsageError
from gpulab.foretelling import foretell
from gpulab.intervals import union
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.values import written
from gpulab.loading.trace import load_run
from gpulab.prediction.batch import fitted
from gpulab.prediction.predict import PREDICTORS, Known, predict
from gpulab.prediction.removal import predict_removal
from gpulab.run import Memory, Pause, Samples, Series, StepFlag
from gpulab.trials.foretold import sizes_to_run

HAND_OFF_US = 2_000.0


def fed(
    step_ms: float = 40.0, wait: float = 0.5, *, cores: float = 8.0, workers: int = 0, length: int | None = None
) -> Facts:
    """A run on a CPU that waits for that share of each step. `length`: batches of an epoch, known or not."""
    known = made.facts_with(step_ms, {"data_wait": wait, "compute": 1 - wait}, workers=workers)
    assert known.run.loader is not None
    run = dataclasses.replace(
        known.run,
        environment=dataclasses.replace(known.run.environment, usable_cores=cores, platform="Linux-6", python="3.12.1"),
        samples=dataclasses.replace(known.run.samples, series=()),
        memory=Memory(peak_rss_bytes=2_000_000_000),
        loader=dataclasses.replace(known.run.loader, length=length),
    )
    return dataclasses.replace(known, run=run)


def timed(known: Facts, *, batch_ms: float, read_ms: float, waited: float = 0.0, workers: int = 0) -> Facts:
    """The same with its batches timed where they are made: what is not reading is collating."""
    inside = LoadingFacts(
        batches=30,
        items_per_batch=32.0,
        batch_us=batch_ms * 1e3,
        read_us=read_ms * 1e3,
        transform_us=0.0,
        collate_us=(batch_ms - read_ms) * 1e3,
        hand_over_us=None,
        pin_us=None,
        copy_us=None,
        read_waited_fraction=waited,
        transform_waited_fraction=None,
        workers=(),
    )
    return dataclasses.replace(known, loading=inside)


def ratio_of(known: Facts, **settings: object) -> float:
    found = predict(known, {name: written(value) for name, value in settings.items()})
    assert found.ratio is not None and found.interval is not None, found.refused
    assert found.interval[0] <= found.ratio <= found.interval[1]
    assert found.basis
    return found.ratio


# every knob


def test_every_knob_has_a_predictor_and_no_other_has() -> None:
    assert set(PREDICTORS) == set(KNOBS)


@pytest.mark.parametrize("case", synthetic.cases())
@pytest.mark.parametrize("name", KNOBS)
def test_whatever_the_run_the_answer_is_a_figure_or_a_reason(case: str, name: str) -> None:
    known = synthetic.cases()[case].facts
    for value in (*KNOBS[name].options, 0, 3, "nonsense"):
        made_of_it = predict(known, {name: written(value)}, Known(sizes={8: (100.0, None), 16: (150.0, 5)}))
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
        ({"pin_memory": "on"}, "GPU"),
        ({"prefetch": "4"}, "workers"),
        ({"hidden": "64"}, "hidden"),
        ({"workers": "many"}, "no value"),
        ({}, "nothing is changed"),
    ],
)
def test_what_the_evidence_does_not_carry_is_refused(settings: dict[str, str], why: str) -> None:
    found = predict(fed(), settings)
    assert found.ratio is None and why in found.refused
    assert found.settings == settings


def test_a_run_without_steps_is_refused() -> None:
    assert "no complete step" in predict(synthetic.no_step_case().facts, {"workers": "2"}).refused


# feeding


@hypothesis.settings(max_examples=40)
@given(st.floats(5, 200), st.floats(0.05, 0.9), st.integers(1, 16), st.floats(1, 32), st.floats(0, 1))
def test_workers_against_the_formula(step_ms: float, wait: float, workers: int, cores: float, waited: float) -> None:
    known = fed(step_ms, wait, cores=cores)
    assert known.step_us is not None and known.data_wait_us is not None
    step, making = known.step_us.median, known.data_wait_us.median
    computing = step - making
    known = timed(known, batch_ms=making / 1e3, read_ms=making / 1e3, waited=waited)
    cpu = making * (1 - waited)
    expected = max(
        computing + HAND_OFF_US,
        making / workers,
        cpu / min(workers, cores),
        (cpu + computing) / cores,
    )
    assert ratio_of(known, workers=workers) == pytest.approx(expected / step, rel=1e-3)


def test_more_workers_never_make_it_slower() -> None:
    known = timed(fed(40, 0.8, cores=2), batch_ms=32, read_ms=30)
    found = [ratio_of(known, workers=count) for count in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True)
    assert found[1] == found[3]  # two cores, and no more


def test_waiting_items_need_no_cores() -> None:
    busy = timed(fed(40, 0.8, cores=1), batch_ms=32, read_ms=32, waited=0.0)
    waiting = timed(fed(40, 0.8, cores=1), batch_ms=32, read_ms=32, waited=1.0)
    assert ratio_of(busy, workers=4) > 0.95
    assert ratio_of(waiting, workers=4) == pytest.approx((8 + 2) / 40, rel=0.05)


def test_what_is_not_known_of_the_items_widens_the_interval() -> None:
    narrow = predict(timed(fed(40, 0.8, cores=2), batch_ms=32, read_ms=32, waited=0.0), {"workers": "4"})
    wide = predict(fed(40, 0.8, cores=2), {"workers": "4"})
    assert narrow.interval is not None and wide.interval is not None
    assert wide.interval[1] / wide.interval[0] > 1.3 * narrow.interval[1] / narrow.interval[0]


def test_workers_that_start_with_each_epoch_cost_their_start_and_its_first_batch() -> None:
    endless = timed(fed(40, 0.8), batch_ms=32, read_ms=32)
    anew = timed(fed(40, 0.8, length=20), batch_ms=32, read_ms=32)
    starting_ms = 40 + 4 * (28 + 25 * 2)  # four workers beside 2 GB
    more = ratio_of(anew, workers=4) - ratio_of(endless, workers=4)
    assert more == pytest.approx((starting_ms + 32) / 20 / 40, rel=1e-3)
    kept = predict(anew, {"workers": "4", "persistent_workers": "on"})
    assert kept.ratio == pytest.approx(ratio_of(endless, workers=4) + 32 / 20 / 40, rel=1e-3)
    narrow, wide = (predict(k, {"workers": "4"}).interval for k in (endless, anew))
    assert narrow is not None and wide is not None
    assert wide[1] - wide[0] > narrow[1] - narrow[0] + starting_ms / 20 / 40
    spawned = dataclasses.replace(anew.run.environment, platform="macOS-15")
    slow = dataclasses.replace(anew, run=dataclasses.replace(anew.run, environment=spawned))
    assert ratio_of(slow, workers=4) == pytest.approx(ratio_of(endless, workers=4) + (2000 + 32) / 20 / 40, rel=1e-3)
    seldom = predict(timed(fed(40, 0.8, length=60), batch_ms=32, read_ms=32), {"workers": "4"})
    assert seldom.ratio == ratio_of(endless, workers=4), "in long epochs a typical step knows nothing of their start"
    assert seldom.interval is not None and seldom.interval[1] > narrow[1] + (starting_ms + 32) / 60 / 40


def test_workers_that_stay_save_the_start_that_was_seen_but_not_the_first_batch() -> None:
    known = timed(fed(10, 0.1, workers=2, length=20), batch_ms=5, read_ms=5)
    late = epochs_begin_late(known, every=20, late_ms=100)
    found = predict(late, {"persistent_workers": "on"})
    assert found.interval is not None and not found.only_sign
    assert found.ratio == pytest.approx(1 - (100 - 5 - 2) / (20 * 10 + 100), rel=0.02)
    assert found.interval[0] < found.ratio < found.interval[1] < 0.9
    untimed = predict(dataclasses.replace(late, loading=None), {"persistent_workers": "on"})
    assert untimed.only_sign and untimed.interval is not None
    assert untimed.interval[0] <= 1 - 100 / 300 and untimed.interval[1] >= 1.0
    saved = tuple(
        Pause("checkpoint_save", start, start + 40_000_000)
        for start in (late.run.steps.start_ns[20::20] - 60_000_000).tolist()
    )
    told = dataclasses.replace(late, run=dataclasses.replace(late.run, pauses=saved))
    less = predict(told, {"persistent_workers": "on"}).ratio
    assert less == pytest.approx(1 - (60 - 5 - 2) / (20 * 10 + 60), rel=0.02)


def epochs_begin_late(known: Facts, *, every: int, late_ms: float) -> Facts:
    """The same with so much more time before each `every`th step, which begins an epoch."""
    steps, run = known.run.steps, known.run
    number = np.arange(len(steps))
    shift = (number // every * late_ms * 1e6).astype(np.int64)
    flags = np.where((number % every == 0) & (number > 0), steps.flags | StepFlag.EPOCH_START, steps.flags)
    moved = dataclasses.replace(
        steps, start_ns=steps.start_ns + shift, end_ns=steps.end_ns + shift, flags=flags.astype(steps.flags.dtype)
    )
    return dataclasses.replace(known, run=dataclasses.replace(run, steps=moved))


def with_threads(known: Facts, threads: int | None, load_pct: float = 100.0) -> Facts:
    """The same computing with so many threads, and a processor that was so busy meanwhile."""
    t = np.arange(0, known.run.wall_ns, 10**7)
    curve = Series("cpu_pct", "%", "CPU", "psutil", t, np.full(len(t), load_pct))
    environment = dataclasses.replace(known.run.environment, compute_threads=threads)
    run = dataclasses.replace(known.run, environment=environment, samples=Samples((curve,)))
    return dataclasses.replace(known, run=run)


def test_threads_and_workers_that_crowd_the_cores_widen_the_interval() -> None:
    known = timed(fed(40, 0.5, cores=2), batch_ms=20, read_ms=20)
    crowded, single = (predict(with_threads(known, n, 75), {"workers": "2"}) for n in (2, 1))
    assert crowded.ratio is not None and single.ratio is not None
    assert crowded.interval is not None and single.interval is not None
    assert crowded.ratio > single.ratio
    assert crowded.interval[1] / crowded.interval[0] > 1.2 * single.interval[1] / single.interval[0]
    waiting = timed(known, batch_ms=20, read_ms=20, waited=1.0)
    alone, beside = (predict(with_threads(waiting, n, 50), {"workers": "2"}) for n in (1, 2))
    assert alone.ratio == beside.ratio  # workers that wait take no core


def test_fewer_threads_compute_as_long_at_best_and_at_worst_as_they_are_fewer() -> None:
    known = with_threads(
        timed(fed(40, 0.5, cores=4), batch_ms=20, read_ms=20), 4, load_pct=62.5
    )  # 4 cores while computing
    alone = predict(known, {"compute_threads": "2"})
    assert alone.ratio == pytest.approx((20 + (20 + 40) / 2) / 40, rel=0.01)
    assert alone.interval is not None and alone.interval[0] < 1.0 and alone.interval[1] > 1.5
    together = predict(known, {"compute_threads": "2", "workers": "2"})
    assert together.ratio == pytest.approx((2 + (20 + 40) / 2) / 40, rel=0.01)
    assert together == predict(known, {"workers": "2", "compute_threads": "2"}) or together.ratio is not None


@pytest.mark.parametrize(
    ("threads", "value", "why"),
    [(2, "4", "more threads"), (None, "1", "not known"), (8, "2", "outnumber the cores"), (2, "0", "no value")],
)
def test_threads_that_nothing_is_foretold_of(threads: int | None, value: str, why: str) -> None:
    assert why in predict(with_threads(fed(40, 0.5, cores=4), threads), {"compute_threads": value}).refused


def test_back_to_no_workers() -> None:
    known = timed(fed(20, 0.0, workers=2), batch_ms=30, read_ms=25)
    assert ratio_of(known, workers=0) == pytest.approx((20 + 30) / 20, rel=0.05)


def test_without_timing_a_loop_that_does_not_wait_says_nothing_of_its_workers() -> None:
    assert "not measured" in predict(fed(20, 0.01, workers=4), {"workers": "0"}).refused


def test_a_loop_that_waits_for_its_workers_tells_their_pace() -> None:
    known = fed(60, 0.5, workers=1)  # one batch in 60 ms
    assert ratio_of(known, workers=2) == pytest.approx((30 + 2) / 60, rel=0.15)


def test_a_cache_leaves_what_puts_the_batch_together() -> None:
    known = timed(fed(40, 0.5), batch_ms=20, read_ms=17)
    assert ratio_of(known, cache=True) == pytest.approx((20 + 3) / 40, rel=0.03)


def test_a_cache_without_timing_is_a_range() -> None:
    found = predict(fed(40, 0.5), {"cache": "on"})
    assert found.only_sign and found.interval is not None
    assert found.interval[0] <= 0.5 and found.interval[1] >= 1.0


def test_settings_in_any_order() -> None:
    known = timed(fed(40, 0.5, cores=4), batch_ms=20, read_ms=17)
    sizes = Known(sizes={32: (40e3, None), 64: (70e3, None)})
    one = predict(known, {"workers": "2", "cache": "on", "batch_size": "128"}, sizes)
    other = predict(known, {"batch_size": "128", "cache": "on", "workers": "2"}, sizes)
    assert one.ratio == other.ratio and one.interval == other.interval


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
    short = Known(sizes={16: (30e3, 1_000), 32: (40e3, 1_500), 45: (48e3, None)})
    found = predict(known, {"batch_size": "64"}, short)
    assert found.ratio == pytest.approx((20 + 0.625 * 64) / 40 / 2, rel=0.02)
    assert found.memory_ratio == pytest.approx(2_500 / 1_500, rel=1e-3)


def test_a_batch_from_one_run_is_a_range_that_knows_starving() -> None:
    computing, starving = (predict(fed(40, wait), {"batch_size": "128"}) for wait in (0.0, 0.9))
    assert computing.only_sign and starving.only_sign
    assert computing.interval is not None and starving.interval is not None
    assert computing.interval[0] == pytest.approx(0.25, rel=0.1)
    assert starving.interval[0] > 0.85  # loading each sample takes what it takes


@given(st.integers(1, 4096), st.lists(st.integers(1, 4096), min_size=1, max_size=4))
def test_sizes_that_are_run_are_none_that_is_foretold(before: int, targets: list[int]) -> None:
    hypothesis.assume(before not in targets)
    found = sizes_to_run(before, targets)
    assert not set(found) & set(targets)
    assert found == sorted(set(found)) and min(found) >= 1
    assert max(found) <= max(before, *targets)


# the optimizer, seen in a real run on this machine


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
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


def test_a_fused_optimizer_saves_at_most_the_optimizer(trained: dict[str, Facts]) -> None:
    known = trained["AdamW"]
    assert known.step_us is not None and known.optimizer_us is not None
    share = known.optimizer_us.median / known.step_us.median
    assert 1 - share - 1e-9 < ratio_of(known, fused_optimizer=True) <= 1 + 1e-9
    assert ratio_of(known, fused_optimizer=False) == pytest.approx(1)
    whole, part = Spread(900e3, 900e3, 900e3, 20), Spread(450e3, 450e3, 450e3, 20)  # so slow that it surely saves
    slow = dataclasses.replace(known, step_us=whole, optimizer_us=part)
    assert 0.5 < ratio_of(slow, fused_optimizer=True) < 0.75


def test_accumulation_saves_at_most_the_steps_left_out(trained: dict[str, Facts]) -> None:
    known = trained["AdamW"]
    assert known.step_us is not None and known.optimizer_us is not None
    share = known.optimizer_us.median / known.step_us.median
    for rounds in (2, 4, 8):
        assert ratio_of(known, accumulate=rounds) >= 1 - share * (1 - 1 / rounds)
    assert ratio_of(known, accumulate=8) < ratio_of(known, accumulate=2) < 1


def test_a_plain_optimizer_has_little_to_save(trained: dict[str, Facts]) -> None:
    assert ratio_of(trained["SGD"], fused_optimizer=True) > ratio_of(trained["AdamW"], fused_optimizer=True)


# leaving something out


def test_pauses_are_taken_off_the_account() -> None:
    known = fed(40, 0.2)
    steps, rows = known.run.steps, known.selection.rows
    pauses = tuple(
        Pause("checkpoint_save", int(steps.start_ns[i]), int(steps.start_ns[i]) + 8_000_000) for i in rows[::4].tolist()
    )
    run = dataclasses.replace(known.run, pauses=(*pauses, Pause("gc", int(steps.start_ns[0]), int(steps.end_ns[0]))))
    known = dataclasses.replace(known, run=run)
    found = predict_removal(known, "checkpoint_save")
    following = np.minimum(rows + 1, len(steps) - 1)
    ends = np.where(following > rows, steps.start_ns[following], steps.end_ns[rows])
    whole = int((ends - steps.start_ns[rows]).sum())
    assert found.ratio == pytest.approx(1 - 8e6 * len(pauses) / whole)
    assert found.interval is not None and found.interval[0] < found.ratio < found.interval[1]
    assert found.settings == {}
    given_alone = np.array([(p.start_ns, p.end_ns) for p in pauses], np.int64)
    assert predict_removal(known, "checkpoint_save", union(*given_alone.T)) == found


def test_nothing_to_leave_out_is_refused() -> None:
    assert "nothing of it" in predict_removal(fed(), "gc_pause").refused
    assert "no call waits" in predict_removal(synthetic.cpu_case().facts, "sync_points").refused
    assert predict_removal(synthetic.no_step_case().facts, "sync_points").refused


def test_waits_left_out_of_a_real_trace() -> None:
    known = facts(load_run(real_traces.path("v100_resnet50_workers4")))
    found = predict_removal(known, "blocking_copy")
    assert found.ratio is not None and 0.85 < found.ratio < 0.97  # 9 ms of 118 to 127


# real GPUs


def test_workers_for_a_job_whose_cure_is_known() -> None:
    """v100_resnet50_workers0, and the same job with four workers: its steps 2 to 5 took 118 to 127 ms, not 176."""
    known = facts(load_run(real_traces.path("v100_resnet50_workers0")))
    found = predict(known, {"workers": "4"})
    assert found.ratio is not None and found.interval is not None
    assert found.ratio == pytest.approx(120 / 176, rel=0.07)
    assert found.interval[0] < 120 / 176 < found.interval[1]


def test_mixed_precision_where_the_host_decides_and_where_the_device_does() -> None:
    starved = facts(load_run(real_traces.path("v100_resnet50_workers0")))
    bound = facts(load_run(real_traces.path("v100_ddp_healthy")))
    assert predict(starved, {"amp": "fp16"}).ratio == pytest.approx(1, abs=0.03)
    found = predict(bound, {"amp": "fp16"}).ratio
    assert found is not None and 0.2 < found < 0.7
    assert "bf16" in predict(bound, {"amp": "bf16"}).refused  # a V100 has no units for it
    assert "TF32" in predict(bound, {"tf32": "on"}).refused


def test_a_trace_that_hides_what_the_host_waits_for_is_refused() -> None:
    known = facts(load_run(real_traces.path("mi300_resnet_healthy")))
    assert "does not show where" in predict(known, {"amp": "bf16"}).refused


@pytest.mark.parametrize(
    ("name", "fp16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA H100 PCIe", 756),
        ("Tesla T4", 65),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks_by_the_names_of_drivers(name: str, fp16: float) -> None:
    found = peaks_of(name)
    assert found is not None and found.fp16_tflops == fp16


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", "NVIDIA GB200", "AMD EPYC", "T400", ""])
def test_an_unknown_gpu_has_no_peaks(name: str) -> None:
    assert peaks_of(name) is None


# the door


def test_foretelling_what_was_asked_or_what_the_findings_name() -> None:
    run = fed(40, 0.6).run
    asked = repr(foretell(run, {"workers": 2}))
    assert "workers=2" in asked and "as fast" in asked and "%%gpuprofile --ab workers=2" in asked
    assert "no prediction" in repr(foretell(run, {"amp": "bf16"}))
    with pytest.raises(UsageError, match="no knob"):
        foretell(run, {"wrokers": 2})
    assert "<td" in foretell(run)._repr_html_() or "No finding" in foretell(run)._repr_html_()
