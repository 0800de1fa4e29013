"""Where the CPU computes: operators too short to compute much, copies that only rearrange, and the rules about them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown, StepParts
from gpulab.analysis.host.operator_costs import HostOperators, host_operators
from gpulab.analysis.host.optimizer_work import optimizer_work
from gpulab.diagnosis.cure_predictions import with_predictions
from gpulab.diagnosis.finding import Finding
from gpulab.diagnosis.rules.cores import cpu_oversubscribed
from gpulab.diagnosis.rules.launches import small_batch
from gpulab.diagnosis.rules.operations import layout
from gpulab.prediction.prediction import NOTHING, Prediction
from gpulab.run import Category
from tests.support.rule_cases import case_of, run_of
from tests.support.timelines import MAIN, Span, timeline

US = 1_000
OP, MARK = Category.CPU_OP, Category.USER_ANNOTATION


def accounted(end_us: int, wait_us: int = 0) -> Breakdown:
    """One step from 0."""
    parts = dict.fromkeys(case_of(run_of()).facts.breakdown.steps[0].parts_ns, 0)  # type: ignore[union-attr]
    parts["data_wait"], parts["compute"] = wait_us * US, (end_us - wait_us) * US
    step = StepParts(1, 0, end_us * US, parts, 0, (0, end_us * US))
    return Breakdown("CPU", None, (step,), {}, {}, 1, None, None)


def op(name: str, start_us: int, end_us: int, category: Category = OP) -> Span:
    return Span(name, category, MAIN, start_us * US, (end_us - start_us) * US)


def test_short_operators_and_python_are_calling() -> None:
    spans = [op("aten::mm", 0, 400), op("aten::linear", 500, 700), op("aten::addmm", 510, 560), op("aten::t", 600, 610)]
    found = host_operators(timeline(spans), accounted(1000))
    assert found is not None
    # linear's own: 200 - 50 - 10; long ones: 400 + 140 + 50; `t` is short, and between operators Python runs
    assert found.calling_share == pytest.approx(1 - 590 / 1000)
    assert found.count == 4 and found.short_count == 1
    waited = host_operators(timeline(spans), accounted(1000, wait_us=200))
    assert waited is not None and waited.calling_share == pytest.approx(1 - 790 / 1000)
    own = host_operators(timeline(spans), accounted(1000), preparing=0.3)  # looks beside the profiled steps tell so
    assert own is not None and own.calling_share == pytest.approx(1 - 590 / 1000 - 0.3)


@pytest.mark.parametrize(("gap_us", "is_calling"), [(900, True), (1100, False)])
@pytest.mark.parametrize("at", ["between", "start", "end"])
def test_what_takes_long_between_operators_is_no_call(gap_us: int, is_calling: bool, at: str) -> None:
    first = gap_us if at == "start" else 0
    second = first + 100 + (gap_us if at == "between" else 0)
    end = second + 100 + (gap_us if at == "end" else 0)
    spans = [op("aten::mm", first, first + 100), op("aten::mm", second, second + 100)]
    found = host_operators(timeline(spans), accounted(end))
    assert found is not None
    assert found.calling_share == pytest.approx(gap_us / end if is_calling else 0.0, abs=1e-5)


def test_only_copies_that_rearrange_count() -> None:
    spans = [
        op("aten::contiguous", 0, 300), op("aten::clone", 10, 290), op("aten::copy_", 50, 250),
        op("aten::to", 400, 600), op("aten::_to_copy", 410, 590), op("aten::copy_", 420, 580),
        op("aten::clone", 650, 700), op("aten::to", 655, 695), op("aten::copy_", 660, 690),
        op("aten::copy_", 800, 900),
    ]  # fmt: skip
    found = host_operators(timeline(spans), accounted(1000))
    assert found is not None
    assert found.rearranging_count == 1 and found.rearranging_share == pytest.approx(0.2)
    assert found.span == (50 * US, 250 * US)


def test_nothing_is_said_without_steps_or_operators() -> None:
    whole = replace(accounted(1000), whole_window=True)
    assert host_operators(timeline([op("aten::mm", 0, 10)]), whole) is None
    assert host_operators(timeline([op("Optimizer.step#SGD.step", 0, 10, MARK)]), accounted(1000)) is None


def test_what_an_optimizer_is_handed_in_is_not_its_own_time() -> None:
    spans = [
        op("Optimizer.step#AdamW.step", 0, 900, MARK), op("aten::mm", 10, 300),
        op("autograd::engine::evaluate_function: MmBackward0", 350, 700), op("aten::add_", 720, 880),
    ]  # fmt: skip
    found = optimizer_work(timeline(spans), accounted(1000))
    assert found is not None and found.host_us == 200.0 and found.operators == 1
    plain = optimizer_work(timeline([spans[2], op("Optimizer.step#AdamW.step", 710, 900, MARK)]), accounted(1000))
    assert plain is not None and plain.host_us == 190.0


def host(calling_share: float = 0.8, rearranging_share: float = 0.0, rearranging_count: float = 0.0) -> HostOperators:
    return HostOperators(200.0, 190.0, calling_share, rearranging_share, rearranging_count, None)


def said(answer: object) -> Finding:
    assert isinstance(answer, Finding)
    return answer


def test_a_batch_is_small_where_starting_operations_takes_long() -> None:
    run = run_of()
    found = said(small_batch(case_of(run, {"unknown": 0.3}, host=host())))
    assert "80 % of" in found.summary and found.settings == (("batch_size", "64"),)
    assert found.recoverable_us_per_step == pytest.approx(16_000)
    assert small_batch(case_of(run, host=host(calling_share=0.4))) is None
    assert small_batch(case_of(run, {"data_wait": 0.85}, host=host())) is None, "the wait is the larger part"
    assert small_batch(case_of(run, host=None)) is None


def test_an_optimizer_of_many_operations_is_no_small_batch() -> None:
    run = run_of()
    work = optimizer_work(timeline([op("Optimizer.step#AdamW.step", 0, 900, MARK)]), accounted(1000))
    assert work is not None
    busy = replace(work, host_us=15_000.0)
    assert small_batch(case_of(run, host=host(), optimizer=busy)) is None


def test_rearranging_is_told_from_a_tenth_on() -> None:
    run = run_of()
    found = said(layout(case_of(run, host=host(rearranging_share=0.25, rearranging_count=24.0))))
    assert "25 % of" in found.summary and found.recoverable_us_per_step == pytest.approx(5_000)
    assert layout(case_of(run, host=host(rearranging_share=0.09))) is None


@pytest.mark.parametrize(
    ("threads", "cores", "told"), [(4, 2.0, True), (2, 2.0, False), (2, 1.5, False), (8, 1.5, True)]
)
def test_more_compute_threads_than_cores(threads: int, cores: float, told: bool) -> None:
    run = run_of(cores=cores)
    run = replace(run, environment=replace(run.environment, compute_threads=threads))
    found = cpu_oversubscribed(case_of(run))
    assert (found is not None) is told
    if told:
        assert f"{threads} threads" in said(found).summary and "set_num_threads(2)" in said(found).cure


@pytest.fixture
def foretells(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float, float], None]:
    """Every prediction is this one from now on."""

    def set_to(ratio: float, low: float, high: float) -> None:
        made = Prediction({}, ratio, (low, high), "made up")
        monkeypatch.setattr("gpulab.diagnosis.cure_predictions.predict_from", lambda *given: made)

    return set_to


def cured(us: float, part: str, **settings: str) -> Finding:
    found = Finding("any", "", (), us, "measured", (part,), tuple(settings.items()), cure="as told")
    (told,) = with_predictions(case_of(run_of()).facts, [found], 20_000.0, NOTHING)
    return told


def test_a_cure_gives_back_no_more_than_is_foretold(foretells: Callable[[float, float, float], None]) -> None:
    foretells(0.9, 0.8, 1.0)
    told = cured(10_000.0, "optimizer", fused_optimizer="True")
    assert (
        told.recoverable_us_per_step == pytest.approx(4_000)
        and "10.0 ms per step at most 4.00 ms" in told.evidence[-1].words
    )
    assert cured(4_200.0, "optimizer", fused_optimizer="True").evidence == (), "hardly less needs no word"
    assert cured(1_000.0, "optimizer", fused_optimizer="True").recoverable_us_per_step == 1_000
    assert cured(10_000.0, "data_wait", workers="2").recoverable_us_per_step == 10_000, "workers are but one cure"


def test_workers_that_would_make_it_slower_are_not_advised(foretells: Callable[[float, float, float], None]) -> None:
    foretells(1.5, 1.1, 2.0)
    told = cured(2_000.0, "data_wait", workers="2")
    assert told.settings == () and told.prediction is None
    foretells(1.5, 0.9, 2.0)
    assert cured(2_000.0, "data_wait", workers="2").settings == (), "likely slower"
    foretells(0.9, 0.7, 1.2)
    assert cured(2_000.0, "data_wait", workers="2").settings == (("workers", "2"),), "likely faster"
