"""The bench of planted cells on a busy machine: its counts, and its own clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import loaded_planted


def row(name: str, headline: str, *findings: str, without: float = 0.5) -> dict[str, Any]:
    return {
        "name": name,
        "failed": "",
        "headline": headline,
        "competition_named": loaded_planted.COMPETITION in (headline, *findings),
        "without_a_core": without,
        "load": 5.0,
    }


def test_only_deprived_cells_must_name_the_competition() -> None:
    rows = [
        row("first", "cpu_shared"),
        row("second", "slow_collate", "cpu_shared"),
        row("silent", "slow_collate"),
        row("green", "healthy"),
        row("asleep", "healthy", without=0.05),
        {"name": "broken", "failed": "RuntimeError: no"},
    ]
    totals = loaded_planted.totals(rows)
    assert (totals["cells"], totals["deprived"], totals["named"]) == (5, 4, 2)
    assert totals["not_named"] == ["silent", "green"] and totals["false_green"] == ["green"]
    assert totals["failed"] == ["broken"] and totals["load_average"] == [5.0, 5.0]
    table = loaded_planted.section({"busy_processes": 4, **totals})
    assert table[-1] == "| 5 | 4 | 2 of 4 | 1 |"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell who waits for a core")
def test_the_benchs_clock_never_runs_backwards() -> None:
    before = loaded_planted._waited_s()
    sum(range(100_000))
    assert 0 <= before <= loaded_planted._waited_s()
