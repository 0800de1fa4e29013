"""Lesson 15: rungs that are measured, and the exercise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from msgspec.structs import replace
from torch.nn import functional

from gpulab.lessons import capstone
from gpulab.lessons.capstone import (
    Ladder,
    Rung,
    check_order,
    check_train,
    compare_with_climb,
    draw_ladder,
    judge_order,
    rest_of_step,
    slow_train,
)
from gpulab.lessons.check import NotMeasured, Speed
from gpulab.lessons.figures import png
from gpulab.tuning.record import Experiment
from gpulab.verdict import Verdict
from tests.support.comparisons import a_comparison


def compared(times: float, spread: float = 1.05, verdict: Verdict = "faster") -> Any:
    return replace(a_comparison(), ratio=1 / times, interval=(1 / times / spread, spread / times), verdict=verdict)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    records: dict[str, Any] = {}

    def latest(name: str) -> Experiment:
        if (comparison := records.get(name)) is None:
            raise NotMeasured(f"There is no experiment {name!r} yet: run that cell first.")
        return Experiment((comparison.a, comparison.b), (comparison,), 1.0)

    monkeypatch.setattr(capstone, "latest_experiment", latest)
    monkeypatch.setattr(capstone, "climbs", [])
    return records


def a_climb(comparison: Any, kept: dict[str, str]) -> Any:
    return SimpleNamespace(kept=kept, result=SimpleNamespace(whole=comparison))


def test_a_rung_is_what_was_measured(measured: dict[str, Any]) -> None:
    ladder = Ladder()
    assert repr(ladder) == "The ladder is empty."
    measured["data-first"] = compared(2.0)
    measured["batch-first"] = compared(3.0, spread=4.0, verdict="undecided")
    ladder.add("data-first")
    ladder.add("batch-first")
    ladder.add("data-first")
    assert len(ladder.rungs) == 2 and (best := ladder.best()) is not None and best.times == pytest.approx(2)
    assert "speedup 2.0× (1.9–2.1)" in repr(ladder) and repr(ladder).count("does not count") == 1
    assert "undecided: does not count" in repr(ladder).splitlines()[-1]


def test_a_rung_keeps_its_place_and_says_what_it_adds(measured: dict[str, Any]) -> None:
    ladder = Ladder()
    measured["data-first"], measured["then-batch"] = compared(2.0), compared(3.0)
    assert "no rung 'data-first'" in repr(ladder.add("then-batch", on="data-first")) and not ladder.rungs
    ladder.add("data-first")
    ladder.add("then-batch", on="data-first")
    assert "speedup 1.5× (1.4–1.7) on top of data-first" in repr(ladder)
    assert "undecided" not in repr(ladder), "both are decided"
    measured["data-first"] = compared(3.0)
    ladder.add("data-first")
    assert repr(ladder).endswith("on top of data-first, undecided")
    measured["data-first"] = compared(1.5)
    ladder.add("data-first")
    assert [rung.name for rung in ladder.rungs] == ["data-first", "then-batch"]
    assert "speedup 2.0× (1.8–2.2) on top of data-first" in repr(ladder)


def rung(name: str, times: float, on: str = "", spread: float = 1.05, verdict: Verdict = "faster") -> Rung:
    return Rung.of(name, compared(times, spread, verdict), on)


@pytest.mark.parametrize(
    ("alone", "on_data", "amp", "opening", "words"),
    [
        (1.2, 6.0, 9.0, "It holds here.", "the larger batch: speedup 2.0× (1.8–2.2), more than alone."),
        (1.2, 6.0, 1.0, "Not all of it holds here.", "it costs time here."),
        (1.2, 3.1, 9.0, "Not all of it holds here.", "less than alone."),
        (1.2, 3.7, 9.0, "Undecided.", "whether that is more than alone is undecided."),
        (4.0, 16.0, 30.0, "Not all of it holds here.", "The batch gave more."),
        (1.2, 6.0, 6.1, "Undecided.", "whether it helps here is undecided."),
    ],
)
def test_the_order_of_the_guides_is_judged_by_the_rungs(
    alone: float, on_data: float, amp: float, opening: str, words: str
) -> None:
    rungs = [rung("data-first", 3.0), rung("batch-first", alone), rung("then-batch", on_data, "data-first")]
    note = judge_order(Ladder([*rungs, rung("then-amp", amp, "then-batch")]))
    assert note.opening == opening and words in note.words
    if opening == "It holds here.":
        assert judge_order(Ladder(rungs)).opening == "Undecided.", "precision is part of the claim"
        assert judge_order(Ladder(rungs[:2])).opening == "Not measured."


@pytest.mark.parametrize(
    ("working", "opening"), [(0.97, "90 % is reached."), (0.91, "Undecided."), (0.5, "90 % is not reached.")]
)
def test_what_is_left_is_what_was_measured(working: float, opening: str) -> None:
    idle = {"waiting for the DataLoader": 0.9 - 0.9 * working, "unknown": 0.001}
    top = replace(rung("then-cache", 3.0), working=working, rest=idle)
    lost = replace(rung("batch-first", 1.0, verdict="undecided"), working=0.99)
    note = rest_of_step(Ladder([lost, top]))
    assert note.opening == opening and "then-cache" in note.words
    assert ("waiting for the DataLoader" in note.words) and "unknown" not in note.words
    disturbed = rest_of_step(Ladder([replace(top, rest={"waiting for a core": 0.4})]))
    assert ("other programs" in disturbed.words) and "other programs" not in note.words
    assert rest_of_step(Ladder([lost])).opening == "Not measured."


def test_the_rest_is_what_the_device_does_not_work() -> None:
    measured = rung("data-first", 3.0)
    assert measured.working is not None and measured.before is not None and measured.before < measured.working
    assert set(measured.rest) & {"computing", "optimizer overhead"} == set()
    assert sum(measured.rest.values()) == pytest.approx(1 - measured.working)


def test_the_ladder_is_drawn_with_a_bar_for_each_rung() -> None:
    assert "measure a rung" in repr(draw_ladder(Ladder()))
    odd = rung("$x_1$ <b>", 3.0)
    figure = draw_ladder(Ladder([odd, rung("batch-first", 1.0, verdict="undecided"), replace(odd, working=None)]))
    assert isinstance(figure, Figure)
    axes = figure.axes[0]
    assert len(axes.patches) == 3, "the baseline and two rungs: what has no share has no bar"
    drawn = [text.get_text() for text in axes.texts]
    assert "not measurable" in drawn and sum("does not count" in text for text in drawn) == 1
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (4.0, 2.0, "You got further."),
        (2.0, 4.0, "The climb got further."),
        (2.0, 2.05, "Nobody is ahead for certain."),
    ],
)
def test_who_got_further_is_decided_by_intervals(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any], mine: float, theirs: float, words: str
) -> None:
    ladder = Ladder([Rung.of("mine", compared(mine))])
    assert "run %gpulab climb first" in compare_with_climb(ladder).words
    monkeypatch.setattr(capstone, "climbs", [a_climb(compared(theirs), {"workers": "2"})])
    assert compare_with_climb(ladder).opening == words
    assert compare_with_climb(Ladder()).opening == "So far."
    monkeypatch.setattr(capstone, "climbs", [a_climb(None, {})])
    assert "kept nothing" in compare_with_climb(ladder).words


@pytest.mark.parametrize(
    ("answer", "data", "batch", "state"),
    [
        ("both", 3.0, 1.2, "wrong"),
        ("data", 3.0, 1.2, "right"),
        ("batch", 3.0, 1.2, "wrong"),
        ("batch", 1.2, 3.0, "right"),
        ("data", 1.2, 1.22, "undecided"),
        ("data", None, 1.2, "unanswered"),
    ],
)
def test_the_order_is_judged_by_the_two_rungs(
    measured: dict[str, Any], answer: object, data: float | None, batch: float, state: str
) -> None:
    if data is not None:
        measured["data-first"] = compared(data)
    measured["batch-first"] = compared(batch)
    assert check_order(answer).state == state


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.lessons.digits.time.sleep", lambda seconds: None)
    monkeypatch.setattr(capstone, "SAMPLES", 48)


def few_samples(dataset: Any, model: Any, samples: int) -> None:
    slow_train(dataset, model, 8)


def never_updates(dataset: Any, model: Any, samples: int) -> None:
    model(torch.stack([dataset[i][0] for i in range(samples)]))


def dots(dataset: Any, model: Any, samples: int) -> None: ...


def one_update(dataset: Any, model: Any, samples: int) -> None:
    images = torch.stack([dataset[i][0] for i in range(samples)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    functional.cross_entropy(model(images), torch.zeros(samples, dtype=torch.long)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (dots, "unanswered", "in place of the dots"),
        (few_samples, "wrong", "was given 8 samples in training; expected 48"),
        (never_updates, "wrong", "updated 0 times"),
        (one_update, "wrong", "it is another training"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_another_training_is_no_answer(quick: None, answer: Any, state: str, hint: str) -> None:
    checked = check_train(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


@pytest.mark.parametrize(("low", "high", "state"), [(3.5, 5, "right"), (0.9, 1.1, "wrong"), (2.0, 4.0, "undecided")])
def test_the_same_training_is_judged_by_speed(
    quick: None, monkeypatch: pytest.MonkeyPatch, low: float, high: float, state: str
) -> None:
    speed = Speed((low * high) ** 0.5, (low, high), 1.0, 1.0, 5)
    monkeypatch.setattr("gpulab.lessons.check.time_pairs", lambda before, after, pairs, budget_s: speed)
    checked = check_train(slow_train)
    assert checked.state == state
    assert ("gpulab's report of your training says" in checked.hint) == (state == "wrong")
