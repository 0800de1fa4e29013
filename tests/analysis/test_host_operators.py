"""Where the CPU computes: operators too short to compute much, and copies that only rearrange."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpulab.analysis.breakdown import Breakdown, StepParts
from gpulab.analysis.operators import host_operators
from gpulab.analysis.optimizer_work import optimizer_work
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


def test_what_is_calling_and_what_is_fixed() -> None:
    spans = [op("aten::mm", 0, 400), op("aten::linear", 450, 650), op("aten::addmm", 460, 510), op("aten::t", 550, 560)]
    found = host_operators(timeline(spans), accounted(1000))
    assert found is not None
    # linear's own: 200 - 50 - 10; long ones: 400 + 140 + 50; `t` is short, and between operators Python runs, but not
    # for the 350 up to the end
    assert found.calling_share == pytest.approx(1 - 0.59 - 0.35, abs=1e-5)
    assert found.fixed_share == pytest.approx(1 - 0.59)
    assert found.count == 4 and found.short_count == 1
    waited = host_operators(timeline(spans), accounted(1000, wait_us=200))
    assert waited is not None and waited.fixed_share == pytest.approx(1 - 0.79)
    beside = host_operators(timeline(spans), accounted(1000), 0.3, 0.37)  # as looks during the whole run tell
    assert beside is not None
    assert (beside.fixed_share, beside.calling_share) == pytest.approx((1 - 0.59 - 0.3, 1 - 0.59 - 0.37))


@pytest.mark.parametrize(("gap_us", "share"), [(90, "calling"), (110, "fixed"), (900, "fixed"), (1100, "")])
@pytest.mark.parametrize("at", ["between", "start", "end"])
def test_what_takes_long_between_operators_is_no_call(gap_us: int, share: str, at: str) -> None:
    first = gap_us if at == "start" else 0
    second = first + 100 + (gap_us if at == "between" else 0)
    end = second + 100 + (gap_us if at == "end" else 0)
    spans = [op("aten::mm", first, first + 100), op("aten::mm", second, second + 100)]
    found = host_operators(timeline(spans), accounted(end))
    assert found is not None
    assert found.calling_share == pytest.approx(gap_us / end if share == "calling" else 0.0, abs=1e-5)
    assert found.fixed_share == pytest.approx(gap_us / end if share else 0.0, abs=1e-5)


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


@pytest.mark.parametrize(
    ("name", "calls", "is_calling", "is_fixed"),
    [
        ("aten::embedding_renorm_", 80, False, False), ("aten::gru", 80, False, True),
        ("aten::embedding_renorm_", 40, True, True), ("aten::stack", 80, True, True),
    ],
)  # fmt: skip
def test_what_an_operator_calls_in_a_loop_is_no_call_of_the_code(
    name: str, calls: int, is_calling: bool, is_fixed: bool
) -> None:
    """But for a list, which the code made; and more samples do not make an RNN's loop longer."""
    spans = [op(name, 0, 400), *(op("aten::mul", 4 * i, 4 * i + 3) for i in range(calls))]
    for i in range(40):
        spans += [op("autograd::engine::evaluate_function: MulBackward0", 400 + 5 * i, 404 + 5 * i)]
        spans += [op("aten::mul", 401 + 5 * i, 403 + 5 * i)]
    spans += [op("Optimizer.step#SGD.step", 600, 990, MARK)]
    spans += [op("aten::mul_", 600 + 4 * i, 603 + 4 * i) for i in range(90)]  # says nothing of the forward pass
    found = host_operators(timeline(spans), accounted(1000))
    assert found is not None and found.short_count == calls + 2 * 40 + 90
    all_us, of_loops_us = 1000 - (400 - 3 * calls), 3 * calls + 4 * 40
    assert found.calling_share == pytest.approx((all_us if is_calling else all_us - of_loops_us) / 1000)
    assert found.fixed_share == pytest.approx((all_us if is_fixed else all_us - of_loops_us) / 1000)


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
