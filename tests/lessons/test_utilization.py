"""Lesson 01: batches that are late, the ladder, alerts from a record, and three exercises."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpulab.lessons import utilization
from gpulab.lessons.check import Note, Table
from gpulab.lessons.digits import LateDigits
from gpulab.lessons.utilization import (
    MFU_MISTAKES,
    TRAININGS,
    alerts_with,
    check_mfu,
    draw_ladder,
    draw_sms,
    ladder,
    measure_one_sm,
    meters_of,
    mfu,
    top_table,
)
from gpulab.run import Steps


def test_late_digits_are_the_same_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    batches = [LateDigits(waiting, late_ms=1).__getitems__([3, 1, 7]) for waiting in ("none", "sleep", "poll")]
    assert all(torch.equal(pixels, batches[0][0]) for pixels, _ in batches)
    assert batches[0][0].shape == (3, 64) and batches[0][1].shape == (3,)
    assert slept == [0.001]


def test_polling_ends_when_the_batch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 0.4, 0.9, 1.0])
    digits = LateDigits("poll", late_ms=1000)
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    digits.__getitems__([0])
    assert next(moments, None) is None


def test_another_way_to_wait_is_named() -> None:
    with pytest.raises(ValueError, match="not 'spin'"):
        LateDigits("spin")


# -- what is shown -----------------------------------------------------------------------------------------------------


def side(
    *, device: str = "cpu", curves: tuple[Any, ...] = (), step_us: float | None = 1000.0, waits: float = 0.0
) -> Any:
    """One side of a comparison, as far as a ladder reads it: 60 % computing, 30 % in matrix operators."""
    busy = None if device == "cpu" else 0.6
    share = {"compute": 0.55, "optimizer": 0.05}
    rows = [("aten::addmm", 0.2), ("aten::mm", 0.1), ("aten::gelu", 0.09), ("aten::max_pool2d_backward", 0.05)]
    steps = 4 if step_us else 0
    figures = SimpleNamespace(
        run=SimpleNamespace(device=SimpleNamespace(kind=device)),
        cores=SimpleNamespace(thread_cpu_fraction=0.97, thread_wait_fraction=waits),
        breakdown=SimpleNamespace(
            busy_fraction=busy, share=share, steps=range(steps), wall_ns=(step_us or 0) * 1e3 * steps
        ),
        operators=[SimpleNamespace(name=name, share=share) for name, share in rows],
        curves=curves,
        trace=None,
    )
    return SimpleNamespace(
        label="waiting=none", facts=figures, us_per_step=step_us, us_per_sample=step_us and step_us / 10, failure=""
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        utilization, "working_share", lambda figures: figures and (0.6 if figures.run.device.kind == "cpu" else 0.7)
    )


@pytest.mark.usefixtures("measured")
def test_a_ladder_of_a_cpu_has_no_counters() -> None:
    one = ladder(side(), flop=2e7, peak_flops=100e9)
    shares = {rung.label: rung.share for rung in one}
    assert shares == {
        "wall time": 1.0,
        "as top shows it": 0.97,
        "computing (busy)": 0.6,
        "SM active": None,
        "in matrix operators": pytest.approx(0.3),
        "tensor active": None,
        "MFU": pytest.approx(0.2),
    }
    assert "a CPU has none" in next(rung.why for rung in one if rung.label == "SM active")


@pytest.mark.usefixtures("measured")
def test_a_ladder_of_a_gpu_has_them_where_they_were_read() -> None:
    curves = (
        SimpleNamespace(name="gpu_utilization_pct", mean=20.0, step_mean=98.0),
        SimpleNamespace(name="sm_active_fraction", mean=0.4, step_mean=None),
    )
    one = ladder(side(device="cuda", curves=curves), flop=2e7, peak_flops=100e9)
    assert [(rung.label, rung.share) for rung in one] == [
        ("wall time", 1.0),
        ("GPU utilization (NVML)", pytest.approx(0.98)),
        ("busy", 0.7),
        ("SM active", 0.4),
        ("tensor active", None),
        ("MFU", pytest.approx(0.2)),
    ]


@pytest.mark.usefixtures("measured")
def test_without_a_step_time_there_is_no_mfu() -> None:
    one = ladder(side(step_us=None), flop=2e7, peak_flops=100e9)
    assert one[-1].share is None
    empty = side()
    empty.facts = None
    assert [rung.share for rung in ladder(empty, 2e7, 1e11)[1:-1]] == [None] * 5


@pytest.mark.usefixtures("measured")
def test_the_guess_is_held_against_the_ladder_that_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "_latest", {})
    assert utilization._best_mfu() is None
    monkeypatch.setattr(utilization, "_sides", lambda name: [side(), side(step_us=4000.0)])
    assert not isinstance(draw_ladder("three-ways", 2e7, 100e9), Note)
    assert utilization._best_mfu() == pytest.approx(0.2)


@pytest.mark.usefixtures("measured")
def test_the_table_of_top_compares_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "_sides", lambda name: [side(step_us=4000.0), side(), side(step_us=None)])
    table = top_table("three-ways")
    assert isinstance(table, Table)
    _, first, second, third = table.lines
    assert "97 %" in first and first.endswith("–") and "2,500 samples/s" in first
    assert "300 %" in second and third.endswith("–")
    monkeypatch.setattr(utilization, "_sides", lambda name: [side(), side(waits=0.3)])
    assert repr(top_table("three-ways")).endswith("for up to 30 % of the time the training was ready and had none.")


def test_nvml_says_the_same_of_both_kernels() -> None:
    assert [axes.get_xlabel() for axes in draw_sms().axes] == [
        "time    NVML says 100 %, SM active is 12 %",
        "time    NVML says 100 %, SM active is 100 %",
    ]


def test_without_a_gpu_no_meter_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "No GPU here." in repr(measure_one_sm())


def test_a_meter_that_was_not_read_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = (SimpleNamespace(name="gpu_utilization_pct", maximum=100.0),)
    monkeypatch.setattr(utilization, "facts", lambda run: SimpleNamespace(curves=curves))
    lines = meters_of([SimpleNamespace(name="one-sm")]).lines  # type: ignore[list-item]
    assert lines[1].endswith(" 100 %") and lines[2].endswith("not measurable")


def test_alerts_are_told_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    count, step_ns = 300, 20_000_000
    columns = {name: np.zeros(count, np.int64) for name in Steps.__struct_fields__}
    start = np.arange(count) * step_ns
    columns |= {"number": np.arange(count), "start_ns": start, "end_ns": start + step_ns}
    steps = Steps(**{**columns, "data_wait_ns": np.full(count, step_ns * 3 // 4)})
    run = SimpleNamespace(steps=steps, samples={}, wall_ns=count * step_ns)
    monkeypatch.setattr(utilization, "latest_run", lambda name: run)
    assert "No alert." in repr(alerts_with("polled"))
    assert "the DataLoader's batches come late" in repr(alerts_with("polled", alert_after_s=1))
    with pytest.raises(Exception, match="alert_after"):
        alerts_with("polled", alert_afters=1)


# -- the exercises -----------------------------------------------------------------------------------------------------


def solution(forward_flop: float, samples_per_s: float, sheet_tflops: float, with_sparsity: bool) -> float:
    model_flops = 3 * forward_flop * samples_per_s
    return model_flops / (sheet_tflops * 1e12 / (2 if with_sparsity else 1))


def test_mfu_of_a_training() -> None:
    assert check_mfu(lambda *given: np.float64(solution(*given))).state == "right"
    assert 0.5 < mfu(*TRAININGS[2]) < 0.6, "the cases are trainings that could be"
    assert all(0 < mfu(*training) < 0.6 for training in TRAININGS)


@pytest.mark.parametrize(
    ("words", "mistake"), MFU_MISTAKES, ids=lambda value: value[:30] if isinstance(value, str) else "answer"
)
def test_each_mistake_has_its_own_hint(words: str, mistake: Any) -> None:
    checked = check_mfu(mistake)
    assert (checked.state, checked.hint.endswith(words)) == ("wrong", True), checked
