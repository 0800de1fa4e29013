"""Rows that no clerk could have written are refused."""


def plausible(value):
    return value == value and 0.0 <= value <= 1.0


def check_rows(rows):
    for row in rows:
        bad = [i for i, value in enumerate(row) if not plausible(value)]
        if bad or max(row) - min(row) < 1e-6:
            raise ValueError(f"columns {bad}")
