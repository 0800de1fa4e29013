"""The rules of the host's side on made-up runs with one planted cause each, and on ones without."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.host.dataloader import LoadingFacts
from gpulab.analysis.integrity import Check, Integrity
from gpulab.diagnosis.context import Rule, RuleContext
from gpulab.diagnosis.cure_predictions import with_predictions
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis, Finding, Undetermined
from gpulab.diagnosis.rules import cores, dataloader, dataloader_workers, placement
from gpulab.diagnosis.rules import pauses as pausing
from gpulab.diagnosis.rules.catalogue import kinds
from gpulab.diagnosis.rules.launches import starves
from gpulab.prediction.predict import predict
from gpulab.prediction.prediction import NOTHING, Prediction
from gpulab.run import (
    Batches,
    Category,
    Choice,
    Missing,
    PauseKind,
    Place,
    Run,
    Samples,
    Series,
    Settings,
    StackSamples,
    Steps,
)
from gpulab.thresholds import DEFAULT
from gpulab.views.report.findings import finding_sections
from tests.support import synthetic
from tests.support.rule_cases import STEP_MS, case_of, inside, loader, pauses, run_of

STEP_US = STEP_MS * 1e3


def found(case: RuleContext) -> Diagnosis:
    result = diagnose(case.facts, case.thresholds, predict_cures=False)
    assert not [u for u in result.untold if "fault" in u.record]
    return result


def told(answer: Finding | Undetermined | None) -> Finding:
    assert isinstance(answer, Finding)
    return answer


# Feeding


@pytest.mark.parametrize(("wait", "level"), [(0.05, None), (0.12, "notice"), (0.5, "bad")])
def test_a_step_that_waits_for_data(wait: float, level: str | None) -> None:
    answer = dataloader.data_starved(case_of(run_of(wait=wait), {"data_wait": wait}))
    if level is None:
        assert answer is None
        return
    finding = told(answer)
    assert finding.level == level and finding.confidence == "measured" and finding.parts == ("data_wait",)
    assert finding.recoverable_us_per_step == pytest.approx(wait * STEP_US, rel=1e-3)
    assert f"{wait * 100:.0f} %" in finding.summary and "it loads with 0 workers" in finding.evidence[0].words


def test_on_a_gpu_only_what_its_work_does_not_hide_counts() -> None:
    run = run_of(gpu=True, wait=0.6)
    assert dataloader.data_starved(case_of(run, {"data_wait": 0.05, "compute": 0.95})) is None
    finding = told(dataloader.data_starved(case_of(run, {"data_wait": 0.4, "compute": 0.6})))
    assert finding.recoverable_us_per_step == pytest.approx(0.4 * STEP_US, rel=1e-3)
    assert any("the GPU still works" in e.words for e in finding.evidence)


@pytest.mark.parametrize(
    ("key", "parts", "workers", "line"),
    [
        ("cpu_preprocessing", {"read_ms": 9.0}, 2, "items"),
        ("cpu_preprocessing", {"read_ms": 1.0, "transform_ms": 8.0}, 2, "transform"),
        ("slow_collate", {"read_ms": 1.0, "collate_ms": 8.0}, 2, "collate"),
        ("cpu_preprocessing", {"read_ms": 9.0}, 0, "items"),
    ],
)
def test_without_a_stack_the_line_is_where_the_slow_part_stands(
    key: str, parts: dict[str, float], workers: int, line: str
) -> None:
    run = run_of(wait=0.5, workers=workers)
    known = replace(loader(workers), items_line="items", transform_line="transform", collate_line="collate")
    case = case_of(replace(run, loader=known), {"data_wait": 0.5}, inside(**parts))
    assert told(getattr(dataloader, key)(case)).source_line == line
    unknown = case_of(replace(run, loader=loader(workers)), {"data_wait": 0.5}, inside(**parts))
    assert told(getattr(dataloader, key)(unknown)).source_line == ""


def test_with_clocks_apart_waiting_is_unknown() -> None:
    apart = Integrity((Check("early kernels", 9, "degraded", ("idle_causes",), "the clocks are apart"),))
    case = case_of(run_of(gpu=True, wait=0.6), {"data_wait": 0.0, "compute": 0.5, "unknown": 0.5}, integrity=apart)
    answer = dataloader.data_starved(case)
    assert isinstance(answer, Undetermined) and "clocks" in answer.record
    assert case.loop_waits == pytest.approx(0.6) and starves(case)
    together = case_of(run_of(gpu=True, wait=0.6), {"data_wait": 0.02, "compute": 0.98})
    assert together.loop_waits == pytest.approx(0.02) and not starves(together)


def waiting_at_the_begin_of_each_step(run: Run, ms: int) -> Batches:
    """A batch for each step, which the loop makes itself and waits for."""
    start = run.steps.start_ns
    end, nothing = start + ms * 1_000_000, np.zeros(len(start), np.int64)
    worker = np.full(len(start), -1, np.int32)
    return Batches(
        worker, start, end, end - start, nothing, nothing, nothing, nothing, nothing, nothing, nothing - 1, start, end,
        nothing,
    )  # fmt: skip


def test_pauses_of_every_second_step_count_on_average() -> None:
    run = run_of()
    often = replace(run, pauses=pauses(run, "evaluation", range(5, 60, 2), 12.0))
    finding = found(case_of(often)).of("logging_or_eval")
    assert finding is not None and (finding.recoverable_us_per_step or 0) == pytest.approx(6e3, rel=0.1)


def test_a_minor_cause_is_named_as_the_next() -> None:
    run = run_of(wait=0.5, workers=0)
    evaluating = replace(run, pauses=pauses(run, "evaluation", range(5, 60, 2), 5.0))  # 13 % of the time
    fed = run_of()
    alone = found(case_of(replace(fed, pauses=pauses(fed, "evaluation", range(5, 60, 2), 5.0))))
    assert alone.of("logging_or_eval") is None
    beside = found(case_of(evaluating, {"data_wait": 0.6, "compute": 0.4}))
    assert [f.key for f in beside.findings] == ["data_starved", "logging_or_eval"]
    assert "The next cause is evaluation." in beside.first.after
    less = replace(run, pauses=pauses(run, "evaluation", range(5, 60, 9), 4.0))
    assert found(case_of(less, {"data_wait": 0.6, "compute": 0.4})).of("logging_or_eval") is None


def test_without_a_breakdown_the_gpu_wait_is_unknown() -> None:
    case = case_of(run_of(gpu=True, wait=0.6), breakdown=None)
    answer = dataloader.data_starved(case)
    assert isinstance(answer, Undetermined) and "profiler" in answer.record
    assert found(case).first.key == "cannot_tell"
    half_busy = tuple(c for c in synthetic.gpu_case().facts.curves if c.name == "gpu_utilization_pct")
    likely = told(dataloader.data_starved(case_of(run_of(gpu=True, wait=0.6), breakdown=None, curves=half_busy)))
    assert likely.confidence == "likely" and (likely.recoverable_us_per_step or 0) < 0.6 * STEP_US


@pytest.mark.parametrize(
    ("wait", "workers", "cores", "settings"),
    [
        (0.2, 0, 8.0, {"workers": "2"}),  # a batch takes a quarter of a step's computing: one worker, and one more
        (0.75, 0, 8.0, {"workers": "4"}),
        (0.75, 0, 2.0, {"workers": "2"}),
        (0.75, 0, None, {"workers": "4"}),
        (0.5, 2, 2.0, {"cache": "on"}),  # no core is left
        (0.5, 2, 16.0, {"workers": "5"}),
    ],
)
def test_workers_follow_the_formula_up_to_the_cores(
    wait: float, workers: int, cores: float | None, settings: dict[str, str]
) -> None:
    run = run_of(wait=wait, workers=workers, cores=cores)
    finding = told(dataloader.data_starved(case_of(run, {"data_wait": wait})))
    assert dict(finding.settings) == settings and finding.cure


def test_an_iterable_dataset_has_no_knob() -> None:
    run = run_of(wait=0.5)
    run = replace(run, loader=loader(0, iterable=True))
    assert told(dataloader.data_starved(case_of(run, {"data_wait": 0.5}))).settings == ()


CAUSES: dict[str, LoadingFacts] = {
    "cpu_preprocessing": inside(read_ms=2, transform_ms=7, collate_ms=1),
    "storage_bound": inside(read_ms=9, transform_ms=1, read_waited=0.9),
    "slow_collate": inside(read_ms=2, transform_ms=1, collate_ms=7),
}


@pytest.mark.parametrize("key", CAUSES)
def test_the_cause_inside_the_loader_makes_the_headline(key: str) -> None:
    result = found(case_of(run_of(wait=0.5), {"data_wait": 0.5}, CAUSES[key]))
    assert [f.key for f in result.findings] == [key]
    assert result.first.recoverable_us_per_step == pytest.approx(0.5 * STEP_US, rel=1e-3)
    assert "waiting for the next batch" in result.first.summary and "10.0 ms" in result.first.evidence[1].words


@pytest.mark.parametrize(
    ("workers", "cores", "settings"),
    [(0, 8.0, {"workers": "2"}), (2, 2.0, {}), (0, None, {"workers": "2"})],
)
def test_putting_together_has_its_own_cure_and_no_cache_helps_it(
    workers: int | None, cores: float | None, settings: dict[str, str]
) -> None:
    run = run_of(wait=0.5, workers=workers, cores=cores)
    finding = told(dataloader.slow_collate(case_of(run, {"data_wait": 0.5}, CAUSES["slow_collate"])))
    assert dict(finding.settings) == settings and "torch.stack" in finding.cure
    assert "cache" not in finding.cure and "each item cheaper" not in finding.cure
    assert ("num_workers=2" in finding.cure) is bool(settings)


@pytest.mark.parametrize(
    ("own", "words"), [(True, "in collate_fn;"), (None, "in collate_fn;"), (False, "__getitem__ return")]
)
def test_who_puts_together_decides_the_cure(own: bool | None, words: str) -> None:
    run = replace(run_of(wait=0.5), loader=replace(loader(0), own_collate=own))
    finding = told(dataloader.slow_collate(case_of(run, {"data_wait": 0.5}, CAUSES["slow_collate"])))
    assert words in finding.cure


def test_an_iterable_dataset_that_puts_together_slowly() -> None:
    run = replace(run_of(wait=0.5), loader=loader(0, iterable=True))
    finding = told(dataloader.slow_collate(case_of(run, {"data_wait": 0.5}, CAUSES["slow_collate"])))
    assert finding.settings == () and "torch.stack" in finding.cure


# The line that loads

LOADING = (
    Place("cell", 3, "Photos.__getitem__", "image = image.rotate(3)"),
    Place("cell", 4, "Photos.__getitem__", "image = image.resize((48, 48))"),
    Place("cell", 9, "", "for x, y in loader:"),
    Place("cell", 12, "", "loss.backward()"),
)


def _looked_at(run: Run, found: Sequence[int], *, exact: bool = True) -> Run:
    """A look each millisecond of the profiled steps: within the wait, their first half, these places in turn."""
    collected = synthetic._Spans()
    training = collected.lane("thread", 4711)
    rows = np.flatnonzero(np.isin(run.steps.number, run.traced_numbers))
    looks: list[tuple[int, int]] = []
    for row in rows.tolist():
        start, end = int(run.steps.start_ns[row]), int(run.steps.end_ns[row])
        middle = start + (end - start) // 2
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        collected.add(training, Category.USER_ANNOTATION, name, start, middle)
        times = range(start + synthetic.MS, end, synthetic.MS)
        looks += [(t, found[i % len(found)] if t < middle else 3) for i, t in enumerate(times)]
    window = (int(run.steps.start_ns[rows[0]]), int(run.steps.end_ns[rows[-1]]))
    t, place = np.array(looks, np.int64).T
    stack = StackSamples(t, place.astype(np.int32), window[0], exact=exact)
    return replace(run, timeline=collected.timeline(window, training), stack=stack, places=LOADING)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([0], LOADING[0]),
        ([0, 0, 1], LOADING[0]),
        ([0, 1, 0, 1, 1, 2, 2], None),  # four, three and two of nine: no line takes half
        ([0, 2, 2], LOADING[2]),
        ([-1], None),
        ([0, -1, -1], None),
    ],
)
@pytest.mark.parametrize("key", [*CAUSES, "data_starved"])
def test_the_line_that_loads_is_named(key: str, found: list[int], line: Place | None) -> None:
    run = _looked_at(run_of(wait=0.5), found)
    case = case_of(run, {"data_wait": 0.5}, CAUSES.get(key))
    assert told(getattr(dataloader, key)(case)).source_line == ("" if line is None else str(line))


def test_a_thread_of_ours_names_no_line_that_loads() -> None:
    """It sees the loading where that calls PyTorch, not in the loop of Python before."""
    run = _looked_at(run_of(wait=0.5), [0], exact=False)
    assert told(dataloader.data_starved(case_of(run, {"data_wait": 0.5}))).source_line == ""


def test_where_workers_load_the_training_thread_shows_no_line() -> None:
    run = _looked_at(run_of(wait=0.5, workers=2), [0])
    assert told(dataloader.data_starved(case_of(run, {"data_wait": 0.5}))).source_line == ""


def test_a_mixture_names_no_cause() -> None:
    mixed = inside(read_ms=4, transform_ms=2, collate_ms=4, read_waited=0.9)
    result = found(case_of(run_of(wait=0.5), {"data_wait": 0.5}, mixed))
    assert [f.key for f in result.findings] == ["data_starved"]
    assert not [u for u in result.untold if u.key in CAUSES]


@pytest.mark.parametrize(
    ("ratio", "interval", "only_sign", "kept"),
    [
        (0.6, (0.5, 0.7), False, True),
        (1.0, (0.9, 1.1), False, False),
        (1.2, (1.1, 1.3), False, False),
        (1.2, (0.8, 1.6), False, False),
        (0.99, (0.5, 1.5), True, True),  # nothing but a range is known
        (None, None, False, True),
    ],
)
def test_a_setting_predicted_to_bring_nothing_is_not_advised(
    monkeypatch: pytest.MonkeyPatch,
    ratio: float | None,
    interval: tuple[float, float] | None,
    only_sign: bool,
    kept: bool,
) -> None:
    told_so = Prediction({"workers": "4"}, ratio, interval, "", only_sign=only_sign)
    monkeypatch.setattr("gpulab.diagnosis.cure_predictions.predict_from", lambda *_: told_so)
    case = case_of(run_of(wait=0.5), {"data_wait": 0.5})
    [first] = with_predictions(case.facts, [told(dataloader.data_starved(case))], STEP_US, NOTHING)
    assert (first.settings != ()) is kept and (first.prediction is not None) is kept
    assert ("cheaper to prepare" in first.cure) is not kept and "larger batch" not in first.cure


def test_time_between_steps_is_not_bounded_by_what_a_step_takes() -> None:
    run = run_of(epoch_starts={0: 900.0, 20: 900.0, 40: 900.0}, workers=2)
    case = case_of(run)
    [own] = [told(dataloader_workers.worker_restart(case))]
    [bound] = with_predictions(case.facts, [own], STEP_US, NOTHING)
    assert own.recoverable_us_per_step == bound.recoverable_us_per_step == pytest.approx(30e3, rel=1e-3)
    assert bound.prediction is not None and not any("hidden" in e.words for e in bound.evidence)


def test_a_useless_setting_leaves_the_cure_of_another_finding() -> None:
    case = case_of(run_of(wait=0.5), {"data_wait": 0.5})
    told_so = Prediction({"workers": "4"}, 1.0, (0.9, 1.1), "")
    other = replace(told(dataloader.data_starved(case)), cure="One thread each.", otherwise="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpulab.diagnosis.cure_predictions.predict_from", lambda *_: told_so)
        [left] = with_predictions(case.facts, [other], STEP_US, NOTHING)
        assert left.cure == "One thread each." and left.settings == ()
        slow = case_of(run_of(wait=0.5), {"data_wait": 0.5}, CAUSES["slow_collate"])
        collating = told(dataloader.slow_collate(slow))
        [left] = with_predictions(slow.facts, [collating], STEP_US, NOTHING)
    assert (
        "If that is not enough: load with 2 worker" in collating.cure
        and "torch.stack" in left.cure
        and "worker" not in left.cure
    )


def test_a_cause_without_a_wait_is_none() -> None:
    for loading in CAUSES.values():
        result = found(case_of(run_of(wait=0.02), {"data_wait": 0.02}, loading))
        assert [f.key for f in result.findings] == ["healthy"] and result.untold == ()


def test_what_was_not_timed_inside_is_told() -> None:
    lacking = (Missing("times inside the DataLoader", "the dataset cannot be wrapped", key="workers_inside"),)
    result = found(case_of(run_of(wait=0.5, missing=lacking), {"data_wait": 0.5}))
    assert result.first.key == "data_starved"
    assert {u.key for u in result.untold} >= set(CAUSES)
    assert {u.record for u in result.untold if u.key in CAUSES} == {"It was not timed: the dataset cannot be wrapped"}


# Workers at the beginning of an epoch


def test_workers_that_start_anew_for_each_epoch() -> None:
    run = run_of(epoch_starts={0: 100.0, 20: 100.0, 40: 100.0}, workers=2)
    finding = told(dataloader_workers.worker_restart(case_of(run)))
    assert finding.recoverable_us_per_step == pytest.approx(2 * 100e3 / len(run.steps), rel=1e-3)  # not the first start
    assert finding.settings == (("persistent_workers", "on"),) and "2 times in 60 steps" in finding.evidence[0].words


@pytest.mark.parametrize(
    "change",
    [
        lambda run: replace(run, loader=loader(0)),
        lambda run: replace(run, loader=loader(2, persistent=True)),
        lambda run: replace(run, loader=None),
        lambda run: run_of(epoch_starts={0: 500.0}, workers=2),  # one epoch: workers are started once in any case
        lambda run: run_of(epoch_starts={0: 100.0, 30: 5.0}, workers=2),  # 5 ms in 60 steps of 20 ms
    ],
)
def test_no_restart_to_speak_of(change: Callable[[Run], Run]) -> None:
    run = change(run_of(epoch_starts={0: 100.0, 20: 100.0, 40: 100.0}, workers=2))
    assert dataloader_workers.worker_restart(case_of(run)) is None


def _unrecorded(run: Run) -> Run:
    """Fed by something that is no DataLoader of torch's, and without a trace that names one."""
    return replace(run, loader=None, timeline=None)


def test_epochs_that_begin_slowly_without_a_record_of_the_loader() -> None:
    slow = _unrecorded(run_of(epoch_starts={0: 100.0, 20: 100.0, 40: 100.0}, workers=2))
    answer = dataloader_workers.worker_restart(case_of(slow))
    assert (
        isinstance(answer, Undetermined) and "100 ms" in answer.what and "torch.utils.data.DataLoader" in answer.record
    )
    for quiet in (run_of(epoch_starts={0: 500.0}), run_of(epoch_starts={0: 100.0, 20: 0.0, 40: 0.0})):
        assert dataloader_workers.worker_restart(case_of(_unrecorded(quiet))) is None


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_that_is_made_anew_cannot_stay(persistent: bool) -> None:
    run = run_of(epoch_starts={0: 100.0, 20: 100.0, 40: 100.0}, workers=2)
    assert run.loader is not None
    loader = replace(run.loader, persistent_workers=persistent)
    run = replace(run, loader=replace(loader, remade=True))
    finding = told(dataloader_workers.worker_restart(case_of(run)))
    assert (
        not finding.settings and "once, before the loop" in finding.cure and "persistent_workers=True" in finding.cure
    )
    refused = predict(case_of(run).facts, {"persistent_workers": "on"}).refused
    assert "anew for each epoch" in refused


# Cores


def _loaded(pct: float, run_workers: int, **more: float) -> RuleContext:
    run = run_of(wait=more.pop("wait", 0.5), workers=run_workers, cores=2.0)
    t = np.arange(0, run.wall_ns, 50 * 10**6)
    curve = Series("cpu_pct", "%", "CPU", "psutil", t, np.full(len(t), pct))
    run = replace(run, samples=Samples((curve,)))
    return case_of(run, {"data_wait": 0.5}, inside(transform_ms=10, core_wait=more.get("core_wait", 0.0)))


@pytest.mark.parametrize(("pct", "workers", "core_wait"), [(60.0, 8, 0.7), (99.0, 8, 0.05), (99.0, 2, 0.3)])
def test_no_guess_about_the_cores(pct: float, workers: int, core_wait: float) -> None:
    assert cores.cpu_oversubscribed(_loaded(pct, workers, core_wait=core_wait)) is None


# Where the model computes


def test_a_gpu_that_is_there_and_was_not_used() -> None:
    chosen = (Choice("device", "CPU", "the profiled steps made no CUDA call"),)
    result = found(case_of(run_of(choices=chosen)))
    assert result.first.key == "wrong_device" and result.first.level == "bad"
    assert result.first.confidence == "likely"  # what the GPU takes instead is not known
    assert found(case_of(run_of())).first.key == "healthy"


def test_a_part_of_the_model_left_on_the_cpu() -> None:
    run = synthetic.gpu_case().run
    assert run.timeline is not None
    clean = placement.wrong_device(case_of(run, {"compute": 0.5, "launch": 0.5}))
    assert clean is None
    names = tuple("aten::addmm" if n == "aten::linear" else n for n in run.timeline.names)
    collected = synthetic._Spans()
    training = collected.lane("thread", 4711)
    stream = collected.lane("stream", 7, process=0)
    rows = np.flatnonzero(np.isin(run.steps.number, run.traced_numbers))
    for k, row in enumerate(rows.tolist()):
        start, end = int(run.steps.start_ns[row]), int(run.steps.end_ns[row])
        middle = start + (end - start) // 2
        collected.add(training, Category.CPU_OP, "aten::addmm", start, middle)
        collected.add(training, Category.CUDA_RUNTIME, "cudaLaunchKernel", middle, middle + 5000, k + 1)
        collected.add(stream, Category.KERNEL, "gemm", middle + 6000, end, k + 1)
    window = (int(run.steps.start_ns[rows[0]]), int(run.steps.end_ns[rows[-1]]))
    run = replace(run, timeline=collected.timeline(window, training))
    finding = told(placement.wrong_device(case_of(run, {"compute": 0.5, "launch": 0.5})))
    assert "50 %" in finding.summary and "aten::addmm" in finding.evidence[0].words and names


# Pauses


def test_saving_within_steps_and_between_them() -> None:
    run = run_of()
    place = Place("cell", 7, "", "torch.save(model.state_dict(), path)")
    saved = replace(run, pauses=pauses(run, "checkpoint_save", range(10, 60, 10), 18.0, 0), places=(place,))
    finding = told(pausing.checkpoint_save(case_of(saved)))
    assert finding.recoverable_us_per_step == pytest.approx(5 * 18e3 / 55)  # 55 steps after the warm-up
    assert finding.source_line == "line 7 of the cell: torch.save(model.state_dict(), path)"
    assert finding.evidence[0].span == (saved.pauses[0].start_ns, saved.pauses[0].end_ns)
    assert finding.parts == ("between_steps/checkpoint_save",)


def test_a_pause_in_every_step_is_a_part_of_the_typical_step() -> None:
    run = run_of()
    logged = replace(run, pauses=pauses(run, "logging", range(60), 6.0))
    result = found(case_of(logged, {"compute": 0.7, "unknown": 0.3}))
    assert result.first.key == "logging_or_eval"
    assert result.first.recoverable_us_per_step == pytest.approx(6e3, rel=0.01)
    assert result.total_us == pytest.approx(STEP_US, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "title"),
    [("logging", "Logging"), ("evaluation", "Evaluation"), ("callback", "Callbacks and schedulers")],
)
def test_a_title_names_only_what_was_measured(kind: PauseKind, title: str) -> None:
    run = run_of()
    paused = replace(run, pauses=pauses(run, kind, range(60), 6.0))
    result = found(case_of(paused, {"compute": 0.7, "unknown": 0.3}))
    titles = [s.title for s in finding_sections(result, below_headline=True)]
    assert titles[0] == f"1. {title}"


def test_what_is_not_heard_is_not_blamed() -> None:
    run = run_of()
    logged = replace(run, pauses=pauses(run, "logging", range(60), 6.0))
    finding = told(pausing.logging_or_eval(case_of(logged, {"compute": 0.7, "unknown": 0.3})))
    assert "print" not in finding.evidence[0].words and "logged" in finding.evidence[0].words


@pytest.mark.parametrize(
    ("kind", "rows", "ms", "key"),
    [
        ("gc", range(5, 60), 1.0, "gc_pause"),
        ("evaluation", range(9, 60, 10), 60.0, "logging_or_eval"),
        ("compile", range(10, 60, 5), 15.0, "recompilation"),
        ("checkpoint_save", range(8, 60, 8), 30.0, "checkpoint_save"),
    ],
)
def test_each_kind_of_pause_has_its_finding(kind: str, rows: range, ms: float, key: str) -> None:
    run = run_of()
    paused = replace(run, pauses=pauses(run, kind, rows, ms))  # type: ignore[arg-type]
    assert found(case_of(paused, {"compute": 0.9, "unknown": 0.1})).first.key == key


@pytest.mark.parametrize(
    ("kind", "rows", "ms"),
    [
        ("checkpoint_save", [30], 200.0),  # once
        ("checkpoint_save", [20, 40], 5.0),  # cheap
        ("evaluation", [20, 40], 60.0),  # a tenth of the time
        ("compile", [0, 1, 2], 200.0),  # within the warm-up
    ],
)
def test_small_or_single_pauses_are_good_practice(kind: str, rows: list[int], ms: float) -> None:
    run = run_of()
    paused = replace(run, pauses=pauses(run, kind, rows, ms))  # type: ignore[arg-type]
    assert found(case_of(paused)).first.key == "healthy"


def test_garbage_collected_while_saving_is_saving() -> None:
    run = run_of()
    rows = range(6, 60, 6)
    both = replace(run, pauses=pauses(run, "checkpoint_save", rows, 18.0) + pauses(run, "gc", rows, 18.0))
    assert [f.key for f in found(case_of(both)).findings] == ["checkpoint_save"]


def test_a_trace_from_elsewhere_does_not_name_pauses() -> None:
    run = run_of(source="trace")
    result = found(case_of(run, {"unknown": 0.3, "compute": 0.7}))
    assert {"checkpoint_save", "gc_pause", "recompilation", "logging_or_eval"} <= {u.key for u in result.untold}
    assert found(case_of(run)).untold == ()


# Where nothing speaks


def test_two_steps_and_no_trace_tell_nothing() -> None:
    two = synthetic.tiny_case().run
    none = replace(two, traced_numbers=(), timeline=None, settings=Settings(trace=False))
    result = found(case_of(none, integrity=None))
    assert result.first.key == "cannot_tell" and "Only 2 steps ran" in result.first.summary
    empty = replace(none, steps=Steps.empty())
    assert "No training step" in found(RuleContext(synthetic.facts_of(empty), DEFAULT)).first.summary


@pytest.mark.parametrize(
    ("shares", "key"),
    [
        ({}, "healthy"),
        ({"unknown": 0.1}, "healthy"),
        ({"unknown": 0.5}, "cannot_tell"),
        ({"other": 0.05, "unknown": 0.04, "memset": 0.0, "optimizer": 0.05}, "healthy"),
        ({"other": 0.07, "unknown": 0.14, "memset": 0.0, "optimizer": 0.12}, "cannot_tell"),
        ({"unknown": 0.16}, "cannot_tell"),
    ],
)
def test_one_verdict_where_no_cause_speaks(shares: dict[str, float], key: str) -> None:
    result = found(case_of(run_of(), shares))
    assert [f.key for f in result.findings] == [key]


@pytest.mark.parametrize("rule", [k.rule for k in kinds() if k.rule is not None], ids=lambda rule: rule.__name__)
def test_no_rule_fails_where_little_is_known(rule: Rule) -> None:
    bare = replace(run_of(), steps=Steps.empty(), loader=None, timeline=None, samples=Samples(), traced_numbers=())
    facts = replace(synthetic.facts_of(bare), curves=())
    for known in (facts, synthetic.tiny_case().facts, synthetic.no_step_case().facts, synthetic.no_trace_case().facts):
        answer = rule(RuleContext(known, case_of(run_of()).thresholds))
        assert answer is None or isinstance(answer, Finding | Undetermined)
