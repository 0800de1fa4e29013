"""How figures are written: in order, near enough to read back, and never as nothing or all where that is wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from gpulab.formatting import (
    NOT_MEASURABLE,
    capitalized,
    decapitalized,
    difference,
    duration,
    duration_range,
    durations,
    factor,
    factor_within,
    number,
    percent,
    plain_values,
    plural,
    rate,
    reading,
    sentence,
    signed_percent,
    size,
    speed_within,
    speedup,
    while_s,
)

UNITS = {
    "µs": 1.0,
    "ms": 1e3,
    "s": 1e6,
    "min": 60e6,
    "h": 3600e6,
    "bytes": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "%": 0.01,
}
TIMES_US = st.floats(1e-3, 1e14)


def read(text: str) -> float:
    """A figure back from its text. What is only bounded is read as its bound."""
    text = re.sub(r"^[<>] ", "", text).replace(",", "")
    words = re.findall(r"[\d.]+(?: (?:µs|ms|s|min|h|bytes|KiB|MiB|GiB|%))?", text)
    return sum(float(w.split()[0]) * (UNITS[w.split()[1]] if " " in w else 1) for w in words)


def test_what_is_no_number_is_not_measurable() -> None:
    for value in (None, math.nan, math.inf, -math.inf):
        written = {duration(value), percent(value), difference(value), size(value), rate(value, "steps")}
        assert written == {NOT_MEASURABLE}, value


def test_the_examples_of_the_docstrings() -> None:
    assert [duration(us) for us in (6.5, 38_000, 90e6, 130e6, 434e6, 2e10, 0)] == [
        *("6.50 µs", "38.0 ms", "90.0 s", "2 min 10 s", "7 min 14 s", "5 h 33 min", "0 µs")
    ]
    assert [duration(us) for us in (7_199e6, 7_200e6, -4e12)] == ["119 min 59 s", "2 h 0 min", "-1,111 h 7 min"]
    assert [duration(us) for us in (999.4, 999.9, 999_900)] == ["999 µs", "1.00 ms", "1.00 s"]
    assert durations(950, 1_200) == ("0.95 ms", "1.20 ms") and duration_range(950, 1_200) == "0.95–1.20 ms"
    assert [while_s(s) for s in (12.8, 125, 0.2, 0)] == ["12 s", "2 min 5 s", "less than 1 s", "0 s"]
    assert [percent(x) for x in (0, 0.0002, 0.004, 0.0137, 0.05, 0.6, 0.998, 0.9999, 1, 1.5)] == [
        *("0 %", "< 0.1 %", "0.4 %", "1.4 %", "5 %", "60 %", "99.8 %", "> 99.9 %", "100 %", "150 %")
    ]
    assert [difference(x) for x in (0, 1.2e-6, 0.0137, 0.6)] == ["0 %", "0.00012 %", "1.4 %", "60 %"]
    assert [signed_percent(x) for x in (0.03, -0.0004, 0)] == ["+3 %", "−0.040 %", "0 %"]
    assert [size(x) for x in (900 * 2**20, 2**31, 300)] == ["900 MiB", "2.00 GiB", "300 bytes"]
    assert [factor(x) for x in (1.07, 1.034, 1.62, 14.2, 0.03)] == ["1.07", "1.03", "1.6", "14", "0.030"]
    assert factor_within(2.9, (2.7, 3.1)) == ("2.9", "2.7–3.1") and factor_within(2.9, None) == ("2.9", "")
    assert speed_within(0.4, (0.25, 0.5)) == ("2.5", "2.0–4.0") and speed_within(0.4, None) == ("2.5", "")
    assert [speedup(2.1, (2.0, 2.3)), speedup(0.5)] == ["speedup 2.1× (2.0–2.3)", "2.0× slower"]
    assert speedup(0.5, (0.4, 0.8), ("{} the rate", "")) == "0.50× the rate (0.40–0.80)"
    assert rate(1_650.3, "samples") == "1,650 samples/s" and reading(310.04, "W") == "310 W"
    assert [number(x) for x in (4, 10 / 3, 1_234.5)] == ["4", "3.33", "1,234"]
    assert [capitalized(x) for x in ("its state", "PyTorch", "")] == ["Its state", "PyTorch", ""]
    given = ("Its state", "A step", "GPUs", "DataLoader settings", "")
    assert [decapitalized(x) for x in given] == ["its state", "a step", "GPUs", "DataLoader settings", ""]
    assert [sentence(x) for x in ("half of it waits", "Really?", "")] == ["Half of it waits.", "Really?", ""]
    assert plural(1, "step") == "1 step" and plural(2, "step") == "2 steps" and plural(0, "step") == "0 steps"


@given(TIMES_US)
@example(119.5e6)
@example(999.5)
def test_a_time_is_read_back_to_its_digits(us: float) -> None:
    text = duration(us)
    assert read(text) == pytest.approx(us, rel=0.006 if us >= 0.995 else 0.05, abs=0.5e6 if us >= 119e6 else 0)
    assert read(text) > 0 and "e" not in text


COUNTS, FRACTIONS = st.floats(1e-3, 1e12), st.floats(0, 3)
SIZES, DIFFERENCES = st.integers(1, 2**50), st.floats(1e-9, 10)
WAYS: dict[str, tuple[Callable[[Any], str], st.SearchStrategy[float], float]] = {
    "duration": (duration, TIMES_US, 1),
    "percent": (percent, FRACTIONS, 1),
    "difference": (difference, DIFFERENCES, 0.06),
    "signed": (lambda fraction: signed_percent(-fraction), DIFFERENCES, 0.06),
    "size": (size, SIZES, 0.006),
    "factor": (factor, COUNTS, 0.056),
    "number": (number, COUNTS, 0.056),
    "reading": (lambda value: reading(value, ""), COUNTS, 0.056),
}


@pytest.mark.parametrize(("write", "values", "near"), WAYS.values(), ids=WAYS)
@given(data=st.data())
def test_larger_figures_are_never_written_as_smaller_ones(
    write: Callable[[Any], str], values: st.SearchStrategy[float], near: float, data: st.DataObject
) -> None:
    """And what is written is near, but for what is told apart below."""
    low, high = sorted((data.draw(values), data.draw(values)))
    assert read(write(low)) <= read(write(high)) * (1 + 1e-12)
    assert near == 1 or read(write(low)) == pytest.approx(low, rel=near)


@given(TIMES_US, TIMES_US)
def test_two_times_share_their_unit(a: float, b: float) -> None:
    first, second = durations(a, b)
    assert first.split()[1] == second.split()[1]
    assert read(first) > 0 and read(second) > 0


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
@example(math.nextafter(1, 0))
@example(5e-324)
@example(0.0995)
@example(0.9995)
def test_a_share_is_never_written_as_none_or_all(fraction: float) -> None:
    text = percent(fraction)
    assert text not in ("0 %", "0.0 %", "100 %", "100.0 %")
    if text[0] == "<":
        assert fraction < read(text)
    elif text[0] == ">":
        assert fraction > read(text)
    else:
        assert read(text) == pytest.approx(fraction, abs=0.0051)


@given(st.floats(0.2, 5), st.floats(0.001, 0.2), st.floats(0.001, 0.2))
@example(0.25, 0.002, 0.002)
def test_a_factor_lies_within_its_interval_as_written(ratio: float, below: float, above: float) -> None:
    middle, around = factor_within(ratio, (ratio * (1 - below), ratio * (1 + above)))
    low, high = map(float, around.split("–"))
    assert low <= float(middle) <= high
    assert low < high or below + above < 0.003


@given(st.floats(0, 1e6))
def test_a_while_is_whole_seconds(seconds: float) -> None:
    text = while_s(seconds)
    assert "." not in text
    if 0 < seconds < 1:
        assert text == "less than 1 s"
    elif seconds < 7200:
        assert read(text) / 1e6 == math.floor(seconds)
    else:
        assert abs(read(text) / 1e6 - seconds) <= 31


class Interval(Struct):
    """As a record that holds what NumPy computed."""

    ratio: float
    ends: tuple[float, float]


def test_a_record_is_plain_also_with_numbers_of_numpy() -> None:
    record = Interval(np.float64(1.5), (np.float32(1.0), 2.0))  # type: ignore[arg-type]
    assert plain_values([record, np.int64(3)]) == [{"ratio": 1.5, "ends": [1.0, 2.0]}, 3]
    assert json.loads(json.dumps(plain_values(record))) == {"ratio": 1.5, "ends": [1.0, 2.0]}
