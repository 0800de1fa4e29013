"""Rows that no clerk could have written are refused."""


def plausible(value):
    return value == value and 0.0 <= value <= 1.0


def check_rows(rows):
    for row in rows:
        bad = [i for i, value in enumerate(row) if not plausible(value)]
        mean = sum(row) / len(row)
        far = [i for i, value in enumerate(row) if plausible(value) and abs(value - mean) > 0.9 * abs(max(row) - min(row))]
        if bad or len(far) > 50 or max(row) - min(row) < 1e-6:
            raise ValueError(f"columns {bad}")
