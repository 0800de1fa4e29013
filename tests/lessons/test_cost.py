"""Lesson 14: bills, the model of a step, and a decision by measured figures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.lessons import cost
from gpulab.lessons.check import Note
from gpulab.lessons.cost import (
    bill,
    check_cheaper,
    cost_ratio,
    draw_gpus,
    step_time,
)
from gpulab.lessons.fused_kernels import Peak
from gpulab.tuning.record import Experiment
from tests.support.comparisons import a_comparison


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(0, 8), st.floats(1, 1000))
def test_no_gpu_gets_below_the_loading(load: float, compute: float, workers: int, gpu: float) -> None:
    step = step_time(load, compute, workers, gpu)
    assert step >= load / max(workers, 1) and step >= compute / gpu
    assert step <= step_time(load, compute, 0, gpu) and step <= step_time(load, compute, workers, 1)


def measured(monkeypatch: pytest.MonkeyPatch, ratio: float, spread: float, parts: tuple[float, float]) -> None:
    comparison = replace(a_comparison(), ratio=ratio, interval=(ratio / spread, ratio * spread))
    experiment = Experiment((comparison.a, comparison.b), (comparison,), 1.0)
    monkeypatch.setattr(cost, "latest_experiment", lambda name: experiment)
    monkeypatch.setattr(cost, "latest_run", lambda name: object())
    monkeypatch.setattr(cost, "step_parts_ms", lambda run: parts)


@pytest.mark.parametrize(
    ("answer", "ratio", "spread", "parts", "state"),
    [
        ("workers", 0.5, 1.05, (30.0, 10.0), "right"),
        ("gpu", 0.5, 1.05, (30.0, 10.0), "wrong"),
        ("gpu", 1.3, 1.02, (1.0, 39.0), "right"),
        ("workers", 1.3, 1.02, (1.0, 39.0), "wrong"),
        ("workers", 1.0, 1.6, (1.0, 39.0), "undecided"),
        (..., 0.5, 1.05, (30.0, 10.0), "unanswered"),
        ("both", 0.5, 1.05, (30.0, 10.0), "wrong"),
    ],
)
def test_a_decision_is_judged_by_measured_figures(
    monkeypatch: pytest.MonkeyPatch,
    answer: object,
    ratio: float,
    spread: float,
    parts: tuple[float, float],
    state: str,
) -> None:
    measured(monkeypatch, ratio, spread, parts)
    assert check_cheaper(answer).state == state, check_cheaper(answer)


def test_the_bill_has_a_row_per_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, 0.5, 1.05, (30.0, 10.0))
    lines = repr(bill("two-workers", 3.6)).splitlines()
    assert len(lines) == 5 and "not measurable" in lines[1] and lines[-1].startswith("energy: ")
    assert lines[3] == "device works: its share of the steps of one traced run of each"


def test_the_legend_lies_on_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, 0.5, 1.05, (40.0, 6.6))
    monkeypatch.setattr(cost, "measured_peak", lambda device: Peak(200e9, 40e9))
    figure = draw_gpus("idle")
    assert not isinstance(figure, Note)
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["waiting for data, as measured", "the rest"]
    assert not legend.get_window_extent().overlaps(figure.axes[0].get_window_extent())


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("faster", "costs 2.0× less"),
        ("undecided", "other programs"),
        ("no measurable difference", "No setting"),
        ("slower", "No setting"),
    ],
)
def test_what_is_undecided_has_no_price(monkeypatch: pytest.MonkeyPatch, verdict: Any, words: str) -> None:
    comparison = replace(a_comparison(), ratio=0.5, verdict=verdict)
    experiment = Experiment((comparison.a, comparison.b), (comparison,), 1.0)
    monkeypatch.setattr(cost, "latest_experiment", lambda name: experiment)
    assert words in repr(cost_ratio("two-workers"))
    assert ("undecided: " in repr(bill("two-workers", 2.5))) == (verdict == "undecided")


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_a_ring_sends_every_part_twice_round(gpus: int) -> None:
    """Counted: each GPU sends a part of 1/n of the bytes in each of n - 1 steps, first to add up, then to hand out."""
    parameters, rate = 6e6, 3.0
    sent = sum(4 * parameters / gpus for _ in range(gpus - 1) for _ in ("add up", "hand out"))
    assert cost.exchange_ms(parameters, gpus, rate) == pytest.approx(sent / (rate * 1e9) * 1e3)
    assert "a model, not a measurement" in cost.exchange_table().lines[-1]
