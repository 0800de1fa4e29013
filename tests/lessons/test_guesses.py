"""A guess beside its measurement, and the field it is typed into."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gpulab.lessons.check import Checked, Note
from gpulab.lessons.guesses import CHEAPER, GuessInput, Question, Revealed, reveal, share
from gpulab.lessons.measured import Faster


def revealed_share(guess: object, measured: float | None) -> Revealed:
    return reveal(guess, share("How much?", lambda: measured, "of each step waits for data"))


def revealed_times(guess: object, measured: Faster | None) -> Revealed:
    return reveal(guess, Question("How fast?", "times", lambda: measured, "with two workers"))


@pytest.mark.parametrize(
    ("guess", "closeness"),
    [
        (80, "exact"),
        (80.4, "exact"),  # written like the measurement
        (78, "close"),
        (67.0, "near"),
        (40, "far"),
        (10, "far"),
        (..., "no guess"),
        (None, "no guess"),
    ],
)
def test_a_share_says_how_close_the_guess_was(guess: object, closeness: str) -> None:
    revealed = revealed_share(guess, 0.8)
    assert revealed.closeness == closeness and revealed.measured == 80
    assert "Measured: 80 % of each step waits for data." in revealed.words
    assert ("Your guess was" in revealed.words) == isinstance(guess, (int, float))
    assert (repr(revealed).startswith("Exactly.")) == (closeness == "exact")


@pytest.mark.parametrize(("guess", "closeness"), [(2.4, "exact"), (2.5, "close"), (4, "far"), (1.9, "near")])
def test_a_factor_is_judged_as_a_ratio(guess: float, closeness: str) -> None:
    assert revealed_times(guess, Faster(2.4, sure=True)).closeness == closeness
    assert revealed_times(2.4 * 2.4 / guess, Faster(2.4, sure=True)).closeness == closeness, (
        "too much is like too little"
    )


@pytest.mark.parametrize("guess", ["40 %", True, float("nan"), float("inf"), [40]])
def test_what_is_no_number_is_named(guess: object) -> None:
    revealed = revealed_share(guess, 0.8)
    assert revealed.closeness == "no guess" and repr(guess) in revealed.words and revealed.guess is None


def test_a_price_is_revealed_as_a_price() -> None:
    question = Question("How cheap?", "times", lambda: Faster(2.2, sure=True), "with two workers", CHEAPER)
    assert "2.2× cheaper with two workers" in reveal(2, question).words
    assert "×, then Enter" in GuessInput("guess_workers", question).html()


def test_what_is_slower_is_said_as_slower() -> None:
    words = revealed_times(0.5, Faster(0.4, sure=True, interval=(0.35, 0.45))).words
    assert words == "Measured: 2.5× slower (2.2–2.9) with two workers. Your guess was 0.5×."


def test_a_figure_that_was_not_measured_is_not_a_zero() -> None:
    assert revealed_share(40, None).closeness == "not measured"
    assert revealed_times(2, None).closeness == "not measured"
    assert "not a number" in revealed_times(0, Faster(2.0, sure=True)).words
    unsure = revealed_times(2, Faster(1.9, sure=False))
    assert unsure.closeness == "undecided" and "speedup 1.9× with two workers may be chance" in unsure.words
    assert (unsure.guess, unsure.measured) == (2, None), "chance is held against nobody"


def test_what_is_undecided_here_is_answered_by_a_quiet_machine() -> None:
    question = Question("How fast?", "times", lambda: Faster(1.6, sure=False), "with two workers")
    words = reveal(2, question, "speedup 2.1× (1.9–2.4) with two workers").words
    assert "On a quiet machine it was: speedup 2.1× (1.9–2.4) with two workers. Your guess was 2×." in words


def test_what_a_reader_wrote_is_escaped() -> None:
    page = revealed_share("<script>", 0.8)._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert "Not yet." in Checked("wrong", "why")._repr_html_()
    assert repr(Note("Close.", "words")) == "Close. words"


def test_a_field_holds_what_is_typed_and_reads_without_a_kernel() -> None:
    field = GuessInput("guess_waiting", share("How much <b>?", lambda: 0.8, "of it"))
    page = field.html()
    assert "How much &lt;b&gt;?" in page and "guess_waiting = 40" in page and "display:none" in page
    assert revealed_share(field, 0.8).closeness == "no guess"
    for kind, value in (("guess", "x"), ("guess", "inf"), ("other", "1")):
        field._receive(None, dict[str, object](kind=kind, value=value), None)
        assert field.value is None
    field._receive(None, {"kind": "guess", "value": "78"}, None)
    assert field.value == 78 and repr(field) == "Your guess: 78 %."
    assert revealed_share(field, 0.8).closeness == "close"


def test_a_closed_field_takes_its_widget_along(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    field = GuessInput("guess_waiting", share("How much?", lambda: 0.8, "of it"))
    widget = SimpleNamespace(over=False)
    widget.close = lambda: closed.append(widget)
    field._widget = widget
    field.close()
    field.close()
    assert closed == [widget] and widget.over
