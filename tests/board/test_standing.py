"""What a class has done: who is stuck, what is right, and what others' files may say."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.board import page
from gpulab.board.standing import MOST_LEARNERS, standing
from gpulab.lessons.catalogue import LESSONS
from gpulab.lessons.progress import Line

NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
LESSON = "03_starving_gpu"


def line(minutes: float, exercise: str = "", kind: str = "opened", state: str = "", **more: object) -> Line:
    time = (NOW - timedelta(minutes=minutes)).isoformat()
    return Line(LESSON, exercise, kind, state, time, **more)  # type: ignore[arg-type]


def check(minutes: float, state: str, exercise: str = "loader") -> Line:
    return line(minutes, exercise, "check", state)


@pytest.mark.parametrize(
    ("lines", "minutes"),
    [
        ([line(5)], None),
        ([line(14)], 14),
        ([line(14), check(1, "wrong")], 14),
        ([line(14), check(1, "undecided")], 14),
        ([line(14), check(1, "right")], None),
        ([line(14), line(1, "waiting", "guess", "far", guess=3.0, measured=4.0)], None),
        ([line(60), check(40, "right"), check(2, "right")], 40),
        ([line(60), check(40, "right"), check(39, "right", "enough-workers")], None),
        ([line(300)], None),
    ],
    ids=["new", "idle", "wrong", "undecided", "right", "guess", "right again", "through", "gone"],
)
def test_who_is_stuck(lines: list[Line], minutes: int | None) -> None:
    [learner] = standing({"a": lines}).learners
    waiting = learner.stuck_for(NOW)
    assert (waiting and waiting.total_seconds() / 60) == minutes


def test_what_was_right_once_stays_right() -> None:
    [learner] = standing({"a": [check(9, "wrong"), check(8, "right"), check(7, "wrong")]}).learners
    assert learner.states == {(LESSON, "loader"): "right"} and learner.attempts == {(LESSON, "loader"): 3}


def test_only_lessons_and_exercises_that_exist_have_a_place() -> None:
    lines = [check(5, "right", "no-such"), Line("99_none", "x", "check", "right", ""), check(4, "brilliant")]
    one = standing({"a": lines})
    assert one.learners[0].states == {} and [entry.name for entry in one.lessons] == [LESSON]
    assert standing({"a": lines}, only=["05_batch_size"]).learners == ()


def test_the_latest_guess_of_each_learner_counts() -> None:
    guesses = [line(5, "workers", "guess", "near", guess=g, measured=2.0, unit="times") for g in (3.0, 4.0)]
    one = standing({"a": guesses, "b": guesses[:1], "c": [line(4, "<b>", "guess", "", guess=1.0, measured=1.0)]})
    assert [(key, [g.guess for g in of]) for key, of in one.guesses.items()] == [((LESSON, "workers"), [4.0, 3.0])]


def test_a_name_is_shown_and_never_run() -> None:
    lines = [line(14, learner='<script>alert("x")</script>\x1b[31m'), check(13, "wrong")]
    shown = page.html(standing({"a": lines}), NOW)
    assert "<script" not in shown and '<script>alert("x")</script>' in unescape(shown)
    assert "\x1b" not in shown + page.text(standing({"a": lines}), NOW)
    assert "no progress for 14 min" in shown and "1 learner, 1 without progress for ten minutes" in shown


def test_an_empty_class_says_so() -> None:
    assert "Nobody has opened a lesson yet." in page.html(standing({}), NOW, note="chmod <x>")
    assert "chmod &lt;x&gt;" in page.html(standing({}), NOW, note="chmod <x>")
    assert page.text(standing({}), NOW) == "Nobody has opened a lesson yet."


def test_a_class_of_hundreds_is_cut() -> None:
    one = standing({f"{i:04}": [line(1)] for i in range(MOST_LEARNERS + 3)})
    assert len(one.learners) == MOST_LEARNERS and "3 more learners are not shown" in page.html(one, NOW)


LINES = st.builds(
    Line,
    lesson=st.sampled_from([entry.name for entry in LESSONS] + ["x"]),
    exercise=st.sampled_from(["loader", "enough-workers", "waiting", "", "<b>"]),
    kind=st.sampled_from(["check", "guess", "opened", "x"]),
    state=st.sampled_from(["right", "wrong", "undecided", "unanswered", "", "<"]),
    time=st.sampled_from(["", "x", "2026-11-23T11:00:00+00:00", "2026-11-23T11:59:00"]),
    guess=st.none() | st.floats(-1e11, 1e11),
    measured=st.none() | st.floats(-1e11, 1e11),
    unit=st.sampled_from(["", "%", "times"]),
    learner=st.text(max_size=8),
)


@given(st.dictionaries(st.text(max_size=3), st.lists(LINES, max_size=6), max_size=4))
def test_any_lines_give_a_page(files: dict[str, list[Line]]) -> None:
    one = standing(files)
    shown = page.html(one, NOW)
    assert shown.count("<tr>") == (len(one.learners) + 2 if one.learners else 0)
    assert re.fullmatch(r"[^<]*(<[a-z/!][^<>]*>[^<]*)*", shown), "every < opens a tag of ours"
    assert page.text(one, NOW)
