"""The toggles of a cell: what each may be, in which order they stand, and what is said of those that cannot act."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gpulab.bench import toggles as toggles_module
from gpulab.bench.toggles import Toggle, data, expected_words, toggles_of
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.knobs.catalogue import KNOBS
from gpulab.prediction.predict import Predictor, refusal
from gpulab.prediction.prediction import Prediction
from tests.knobs.scenes import loading
from tests.support.comparisons import as_written

SCENE = loading(dataset_length=480, batch_size=16)


def drawn(observation: Any = SCENE, settings: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    toggles, why = toggles_of(KNOBS.values(), observation, None)
    assert not why
    return {str(d["name"]): d for d in data(toggles, observation, settings or {}, {})}


def test_each_toggle_has_its_value_control_and_help() -> None:
    toggles = drawn()
    assert toggles.keys() == KNOBS.keys() and json.dumps(list(toggles.values()))
    assert (toggles["batch_size"]["kind"], toggles["batch_size"]["current"]) == ("number", 16)
    assert (toggles["pin_memory"]["kind"], toggles["amp"]["kind"]) == ("switch", "choice")
    assert toggles["tf32"]["reason"] == KNOBS["tf32"].refuses(SCENE, True)
    assert not toggles["workers"]["reason"] and all(t["help"] and t["title"] for t in toggles.values())
    assert not drawn(None), "nothing is known of a cell that has not run"


@pytest.mark.parametrize(
    ("changes", "name", "fixed"),
    [
        ({"iterable": True}, "workers", True),
        ({"dataset_length": 6, "batch_size": 16}, "batch_size", False),
        ({"dataset_length": 1, "batch_size": 1}, "batch_size", True),
    ],
)
def test_what_cannot_be_turned_says_why(changes: dict[str, Any], name: str, fixed: bool) -> None:
    assert bool(drawn(loading(**changes))[name]["reason"]) is fixed


def test_what_one_toggle_can_be_depends_on_the_others() -> None:
    assert drawn()["prefetch"]["reason"], "there are no workers that could prefetch"
    together = drawn(settings={"workers": 2, "prefetch": 4})
    assert not together["prefetch"]["reason"] and not together["prefetch"]["problem"]
    alone = drawn(settings={"prefetch": 4})["prefetch"]
    assert alone["problem"] and not alone["reason"], "it can be taken back"
    assert "the largest is batch_size=480" in drawn(settings={"batch_size": 481})["batch_size"]["problem"]


def test_what_is_expected_to_help_most_stands_first() -> None:
    toggles, why = toggles_of(KNOBS.values(), SCENE, as_written().facts)
    able = [t for t in toggles if not t.reason]
    promising = [t.prediction for t in able if expected_words(t.prediction).startswith("expected ")]
    gains = [p.ratio or 1.0 for p in promising if p is not None]
    assert gains == sorted(gains) and gains[0] < 0.9 and toggles[: len(able)] == tuple(able) and not why
    assert all(t.prediction is not None for t in able[: len(gains)]) and not any(t.folded for t in able[:5])
    assert all(t.folded for t in able[5:]) and expected_words(able[-1].prediction) in ("", "no clear gain expected")
    turned = {str(d["name"]): d for d in data(toggles, SCENE, {able[-1].knob.name: True}, {})}
    assert not turned[able[-1].knob.name]["folded"], "what was turned is seen"
    workers = next(t for t in toggles if t.knob.name == "workers")
    assert workers.proposal and expected_words(workers.prediction).startswith("expected ")
    failures = {f"workers={workers.proposal}": "no effect: nobody asked"}
    tried = {str(d["name"]): d for d in data(toggles, SCENE, {}, failures)}["workers"]
    assert not tried["expected"] and tried["cautions"] == [f"{workers.proposal}: no effect: nobody asked"]


def test_without_expectations_the_diagnosis_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    causes: list[Finding] = [Finding(key, "", (), 1.0, "measured") for key in ("cpu_shared", "cpu_preprocessing")]
    found = Diagnosis((*causes,), (), 1.0)
    monkeypatch.setattr(toggles_module, "diagnosis_for_report", lambda *_: found)
    monkeypatch.setattr(Predictor, "of", lambda _, settings: refusal(settings, "too wide"))
    toggles, why = toggles_of(KNOBS.values(), SCENE, as_written().facts)
    assert why == "No expectations: the machine was contended while this was measured."
    assert [t.knob.name for t in toggles[:2]] == ["workers", "cache"] and sum(t.folded for t in toggles) > 2
    causes.pop(0)
    found = Diagnosis((*causes,), (), 1.0)
    assert toggles_of(KNOBS.values(), SCENE, as_written().facts)[1] == "No expectations: only a run tells."


def test_a_gain_that_the_cell_cannot_earn_stands_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {"cache": Prediction({"cache": "on"}, 0.1, (0.05, 0.2), "", setup_s=18.0)}
    gains["workers"] = Prediction({"workers": "2"}, 0.5, (0.4, 0.6), "")
    monkeypatch.setattr(Predictor, "of", lambda _, s: gains[n] if (n := next(iter(s))) in gains else refusal(s, ""))
    toggles, _ = toggles_of(KNOBS.values(), SCENE, as_written().facts)
    assert toggles[0].knob.name == "workers" and toggles[1].knob.name != "cache"
    shown = {str(d["name"]): d for d in data(toggles, SCENE, {}, {})}
    said = str(shown["cache"]["cautions"])
    assert "expected one-time cost 18.0 s pays off only after 5" in said and said.endswith("the cell runs 40']")
    assert shown["workers"]["cautions"] == []


@pytest.mark.parametrize(
    ("ratio", "interval", "only_sign", "said"),
    [
        (0.5, (0.4, 0.6), False, "expected 2.0× (1.7–2.5)"),
        (0.7, (0.5, 0.9), True, "expected 1.11–2.00×"),
        (1.0, (0.95, 1.1), False, "no clear gain expected"),
        (0.99, (0.84, 1.16), False, "no clear gain expected"),
        (1.5, (1.2, 1.9), False, "slower expected"),
        (None, None, False, ""),
    ],
)
def test_the_expectation_in_words(ratio: Any, interval: Any, only_sign: bool, said: str) -> None:
    prediction = Prediction({"workers": "2"}, ratio, interval, "", only_sign=only_sign)
    assert expected_words(prediction) == said
    assert replace(Toggle(KNOBS["workers"], 0), prediction=prediction).proposal == "2"
