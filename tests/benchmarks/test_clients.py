"""Public trainings beside themselves: which lines count as printed alike, and which promises a row keeps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import clients


def test_times_and_colours_are_no_part_of_a_line() -> None:
    text = "\x1b[1mepoch 1\x1b[0m\rloss 0.25, 3.1 s/it, time 12.5\n\nSPS: 812\n"
    assert clients._lines(text) == ["epoch 1", "loss 0.25, #, #", "#"]


@pytest.mark.parametrize(
    ("printed", "differing"),
    [(["a", "told", "b", "c"], []), (["x", "b", "c", "a"], ["a"]), (["a", "b"], ["c"]), ([], ["a", "b", "c"])],
)
def test_lines_follow_in_their_order(printed: list[str], differing: list[str]) -> None:
    assert clients._missing(["a", "b", "c"], printed) == differing


def row(**changes: Any) -> dict[str, Any]:
    same = {"status": 0, "plain_status": 0, "steps": 8, "step_count": 8, "differing": [], "not_reproducible": 0}
    cost = {"peak_bytes": 2**30, "plain_peak_bytes": 2**30, "wall_s": 102.0, "plain_wall_s": 100.0}
    return {**same, **cost, **changes}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, []),
        ({"status": 1}, ["ends as without gpulab"]),
        ({"step_count": None}, ["right steps"]),
        ({"differing": ["loss 0.25"]}, ["same lines on stdout, where two plain runs print the same"]),
        ({"peak_bytes": 2**30 + 301 * 2**20}, ["at most 300 MiB more memory"]),
        ({"wall_s": 106.9}, []),
        ({"wall_s": 107.1}, ["at most 5 % + 2 s more time"]),
    ],
)
def test_each_promise_is_counted_by_itself(changes: dict[str, Any], broken: list[str]) -> None:
    shares = [figure for figure in clients.figures({"rows": [row(), row(**changes)]}) if figure.unit == "%"]
    assert [figure.what for figure in shares if figure.value == 0.5] == broken
    assert all(figure.value == 1 for figure in shares if figure.what not in broken)
