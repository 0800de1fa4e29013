"""The hot line from counts of looks: named where it is clear, its loop where only that is, and else nothing."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.source_lines import (
    LineCount,
    hot_line_of_loading,
    hot_place,
    line_of,
    lines_beside_cost,
    lower_share,
)
from gpulab.run import Excerpt, LoadingLooks, Place, Run, StackSamples, Unit
from tests.support import synthetic

MS = 1_000_000
LOOP = Unit(10, 12, "for letter in text:")
BODY = tuple(Place("items.py", line, "get", f"line {line}", units=(LOOP,)) for line in (10, 11, 12))
RETURN = Place("items.py", 14, "get", "return torch.tensor(ids)")


def counts(*looks: int) -> list[LineCount]:
    return [LineCount(place, n) for place, n in zip((*BODY, RETURN), looks, strict=True) if n]


@pytest.mark.parametrize(
    ("looks", "total", "line"),
    [
        ((2, 30, 3, 5), 40, 11),  # one line has most
        ((12, 14, 11, 3), 40, 10),  # none has, and the loop does: its first line
        ((0, 4, 0, 0), 4, 11),  # all of few
        ((0, 3, 0, 0), 3, None),  # too few
        ((0, 12, 0, 10), 22, None),  # the lead may be chance
        ((0, 20, 0, 1), 60, None),  # most of the time is at no line of the user's
        ((0, 0, 0, 0), 50, None),
    ],
)
def test_the_line_the_loop_or_nothing(looks: tuple[int, int, int, int], total: int, line: int | None) -> None:
    place = hot_place(counts(*looks), total)
    assert (place.line if place else None) == line
    assert line != 10 or str(place) == "items.py, line 10: for letter in text:"


def test_a_line_and_the_comprehension_in_it_are_one() -> None:
    """Looks at the line are in the function or in the comprehension, as it happens."""
    inside = replace(BODY[1], function="get.<locals>.<genexpr>")
    assert hot_place([LineCount(BODY[1], 19), LineCount(inside, 27)], 48) == inside


def test_the_interval_of_a_share() -> None:
    assert lower_share(50, 100) == pytest.approx(0.4038, abs=1e-3), "Wilson, 95 %"
    assert lower_share(4, 4) > 0.5 > lower_share(3, 3)
    assert lower_share(0, 0) == 0


def run_with(stack: StackSamples) -> Run:
    places = (Place("items.py", 11, "get", "for ch in text:"), Place("items.py", 12, "get", "return torch.tensor(ids)"))
    return replace(synthetic.cpu_case().run, stack=stack, places=places, timeline=None)


def test_exact_looks_count_alike_however_late_they_come() -> None:
    """A look that came late found what ran then, not what ran all the while."""
    t = np.array([2, 4, 6, 8, 10, 60, 62, 64], np.int64) * MS
    place = np.array([0, 0, 0, 0, 0, 1, 0, 0], np.int32)
    times = np.array([[0, 70 * MS]])
    thread, outside = StackSamples(t, place), StackSamples(t, place, exact=True)
    assert str(line_of(run_with(thread), times)) == "items.py, line 12: return torch.tensor(ids)"
    assert str(line_of(run_with(outside), times)) == "items.py, line 11: for ch in text:"


def test_times_that_are_made_of_looks_hold_those_looks() -> None:
    t = np.arange(2, 20, 2, dtype=np.int64) * MS
    stack = StackSamples(t, np.array([0, 1] * 4 + [0], np.int32), exact=True)
    mine = stack.place == 0
    times = np.stack([stack.since_ns[mine], t[mine]], axis=1)
    assert str(line_of(run_with(stack), times)) == "items.py, line 11: for ch in text:"


def loading(*rows: tuple[int, int, int]) -> Run:
    run = run_with(StackSamples(np.empty(0, np.int64), np.empty(0, np.int32)))
    place, collating, count = np.array(rows).T
    looks = LoadingLooks(place.astype(np.int32), collating.astype(np.uint8), count.astype(np.int64))
    run = replace(run, loading_looks=looks)
    run.check()
    return run


def test_the_line_of_loading_counts_all_workers_looks() -> None:
    run = loading((0, 0, 40), (1, 0, 9), (-1, 0, 5), (1, 1, 8))
    assert hot_line_of_loading(run) == run.places[0]
    assert hot_line_of_loading(run, collating=True) == run.places[1]
    assert hot_line_of_loading(loading((0, 0, 20), (-1, 0, 60))) is None, "mostly at nobody's line"
    assert hot_line_of_loading(loading((0, 0, 40), (1, 0, 9), (-1, 0, 60))) == run.places[0], "a sure lead"
    assert hot_line_of_loading(loading((0, 0, 40), (1, 0, 35), (-1, 0, 25))) is None, "no sure lead"


def test_the_source_beside_its_cost() -> None:
    source = (
        "def get(text):",
        "    ids = []",
        "    for ch in text:",
        "        ids.append(ord(ch))",
        "",
        "    return 1",
    )
    run = replace(loading((0, 0, 30)), excerpts=(Excerpt("items.py", 9, source),))
    hot = run.places[0]
    shown = lines_beside_cost(run, hot, [LineCount(hot, 30), LineCount(Place("items.py", 12), 10)], 50)
    assert [(line.number, line.text, line.share) for line in shown] == [
        (9, "def get(text):", None),
        (10, "    ids = []", None),
        (11, "    for ch in text:", 0.6),
        (12, "        ids.append(ord(ch))", 0.2),
        (13, "", None),
        (14, "    return 1", None),
    ]
    assert lines_beside_cost(run, Place("other.py", 11), [], 50) == ()
