"""Lesson 15: rungs that are measured, a certificate that is escaped, and the exercise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from gpulab.lessons import capstone
from gpulab.lessons.capstone import (
    Ladder,
    Rung,
    certificate,
    check_order,
    check_train,
    compare_with_climb,
    given_train,
    small_network,
)
from gpulab.lessons.pairs import Speed
from gpulab.tuning.record import Experiment
from gpulab.verdict import Verdict
from tests.support.comparisons import a_comparison


def compared(times: float, spread: float = 1.05, verdict: Verdict = "faster") -> Any:
    return replace(a_comparison(), ratio=1 / times, interval=(1 / times / spread, spread / times), verdict=verdict)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    records: dict[str, Any] = {}

    def named(name: str) -> Experiment | None:
        comparison = records.get(name)
        return None if comparison is None else Experiment((comparison.a, comparison.b), (comparison,), 1.0)

    monkeypatch.setattr(capstone, "experiment_named", named)
    monkeypatch.setattr(capstone, "climbs", [])
    return records


def test_a_rung_is_what_was_measured(measured: dict[str, Any]) -> None:
    ladder = Ladder()
    assert "run its cell first" in repr(ladder.add("data-first")) and repr(ladder) == "The ladder is empty."
    measured["data-first"] = compared(2.0)
    measured["batch-first"] = compared(3.0, spread=4.0, verdict="undecided")
    ladder.add("data-first")
    ladder.add("batch-first")
    ladder.add("data-first")
    assert len(ladder.rungs) == 2 and ladder.best is not None and ladder.best.times == pytest.approx(2)
    assert "undecided" in repr(ladder) and "2.0 times as fast (1.9 to 2.1)" in repr(ladder)


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
    climb = SimpleNamespace(kept={"workers": "2"}, result=SimpleNamespace(whole=compared(theirs)))
    monkeypatch.setattr(capstone, "climbs", [climb])
    assert compare_with_climb(ladder).opening == words
    assert compare_with_climb(Ladder()).opening == "So far."
    nothing = SimpleNamespace(kept={}, result=SimpleNamespace(whole=None))
    monkeypatch.setattr(capstone, "climbs", [nothing])
    assert "kept nothing" in compare_with_climb(ladder).words


def test_a_certificate_has_the_figures_and_runs_nothing(tmp_path: Path, measured: dict[str, Any]) -> None:
    assert certificate("Ada", Ladder()).opening == "Not yet."
    measured["<b>"] = compared(2.0)
    ladder = Ladder()
    ladder.add("<b>")
    path = tmp_path / "certificate.html"
    assert certificate("<script>alert(1)</script>", ladder, path).opening == "Written."
    page = path.read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script" not in page and "<b>" not in page
    assert "2.0 times as fast (1.9 to 2.1)" in page and "http" not in page
    assert certificate("Ada", ladder, tmp_path / "no" / "folder.html").opening == "Not written."


@pytest.mark.parametrize(
    ("answer", "data", "batch", "state"),
    [
        (..., 3.0, 1.2, "unanswered"),
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
    monkeypatch.setattr("gpulab.lessons.starving.time.sleep", lambda seconds: None)
    monkeypatch.setattr(capstone, "SAMPLES", 48)


def few_samples(dataset: Any, model: Any, samples: int) -> None:
    given_train(dataset, model, 8)


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
        (..., "unanswered", "in place of the dots"),
        (dots, "unanswered", "in place of the dots"),
        (few_samples, "wrong", "was given 8 samples in training, and 48 are wanted"),
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
    monkeypatch.setattr(capstone, "time_pairs", lambda before, after, pairs, budget_s: speed)
    checked = check_train(given_train)
    assert checked.state == state
    assert ("gpulab's report of your training says" in checked.hint) == (state == "wrong")


def test_the_given_training_trains() -> None:
    torch.manual_seed(0)
    model = small_network()
    tried = capstone._tried(lambda dataset, m, samples: given_train(dataset, m, 16), capstone.distant_digits())
    assert (tried.samples, tried.updates, tried.moved) == (16, 2, True)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
