"""The bench of hot lines: what is right, what is wrong, and what the table says."""

from __future__ import annotations

import pytest

from benchmarks.hot_lines.report import section
from benchmarks.hot_lines.scoring import score


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("", "none"),
        ("items.py, line 7: for i in range(3):", "right"),
        ("items.py, line 8: total += i", "right"),
        ("items.py, line 9: return total", "wrong"),
        ("other.py, line 7: for i in range(3):", "wrong"),
        ("items.py, line 5: def __getitem__(self, index):", "function"),
    ],
)
def test_a_line_is_right_within_the_marked_statement(named: str, expected: str) -> None:
    assert score(named, "items.py", range(7, 9)) == expected


def test_the_table_counts_only_cases_with_a_hot_line() -> None:
    rows = [
        {"share": 0.9, "workers": 0, "score": "right"},
        {"share": 0.9, "workers": None, "score": "none"},
        {"share": 0.5, "workers": 0, "score": "wrong"},
    ]
    kept = {"rows": rows, "least_share": 0.7, "target_right": 0.95, "load_average": [3.0, 2.0, 1.0]}
    assert section(kept)[-4:] == [
        "| dataset, no workers | 1 | 1 | 0 | 0 | 0 |",
        "| dataset, 2 workers | 0 | 0 | 0 | 0 | 0 |",
        "| the loop's own step | 1 | 0 | 0 | 1 | 0 |",
        "| all | 2 | 1 | 0 | 1 | 0 |",
    ]
