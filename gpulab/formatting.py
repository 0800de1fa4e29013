"""Formats figures: times, shares, sizes and counts for people, each by one rule; whole records for JSON.

A figure has two or three significant digits and never an exponent. A non-zero value is never written as zero, and a
share below 100 % never as 100 %. None and non-finite numbers are "not measurable".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

NOT_MEASURABLE = "not measurable"

_DURATIONS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
_MINUTES_FROM_US = 119.5e6


def duration(us: float | None) -> str:
    """A time: 6.5 → "6.50 µs", 38_000 → "38.0 ms", 90e6 → "90.0 s", 434e6 → "7 min 14 s", 2e10 → "5 h 33 min"."""
    if us is None or not math.isfinite(us):
        return NOT_MEASURABLE
    if abs(us) >= _MINUTES_FROM_US:
        minutes, seconds = divmod(round(abs(us) / 1e6), 60)
        hours, rest = divmod(round(abs(us) / 60e6), 60)
        words = f"{minutes} min {seconds} s" if minutes < 120 else f"{hours:,} h {rest} min"
        return f"{'-' if us < 0 else ''}{words}"
    scale, unit = time_unit(us)
    return f"{_digits(us / scale)} {unit}" if us else "0 µs"


def duration_ns(ns: float | None) -> str:
    """A time in nanoseconds, in the format of `duration`."""
    return duration(None if ns is None else ns / 1e3)


def time_unit(us: float) -> tuple[float, str]:
    """The largest unit that is not longer than the time, in µs, and its name: 38_000 → 1e3, "ms"."""
    return next((s for s in _DURATIONS if abs(us) >= 0.9995 * s[0]), _DURATIONS[-1])


def durations(first_us: float, second_us: float) -> tuple[str, str]:
    """Two times in one unit, so that they compare at a glance: 950, 1_200 → "0.95 ms", "1.20 ms"."""
    scale, unit = time_unit(max(abs(first_us), abs(second_us)))
    return f"{_digits(first_us / scale)} {unit}", f"{_digits(second_us / scale)} {unit}"


def duration_range(low_us: float, high_us: float) -> str:
    """Two times with their unit once: 950, 1_200 → "0.95–1.20 ms"."""
    low, high = durations(low_us, high_us)
    return f"{low.rpartition(' ')[0]}–{high}"


def while_s(seconds: float) -> str:
    """How long something has gone on or may go on: 12.8 → "12 s", 125 → "2 min 5 s", 0.2 → "less than 1 s"."""
    whole = math.floor(seconds)
    if whole >= 120:
        return duration(whole * 1e6)
    return f"{whole} s" if whole or not seconds else "less than 1 s"


def percent(fraction: float | None) -> str:
    """A share: 0.0002 → "< 0.1 %", 0.0137 → "1.4 %", 0.05 → "5 %", 0.998 → "99.8 %", 0.9999 → "> 99.9 %"."""
    if fraction is None or not math.isfinite(fraction):
        return NOT_MEASURABLE
    pct = 100 * fraction
    if 0 < abs(pct) < 0.1:
        return "< 0.1 %" if pct > 0 else "> -0.1 %"
    if pct >= 99.95 and fraction < 1:
        return "> 99.9 %"
    fine = abs(pct) < 9.95 or 99.5 <= pct < 100
    return f"{pct:.1f} %" if fine and not math.isclose(pct, round(pct), abs_tol=1e-9) else f"{pct:.0f} %"


def difference(fraction: float | None) -> str:
    """A relative difference of two figures, as a share; small differences keep their digits: "0.00012 %"."""
    if fraction is None or not 0 < abs(fraction) < 0.00995:
        return percent(fraction)
    return f"{_significant(100 * fraction, 2)} %"


def signed_percent(fraction: float) -> str:
    """A relative change: 0.03 → "+3 %", -0.0004 → "−0.040 %", 0 → "0 %"."""
    return f"{'+' if fraction > 0 else '−' if fraction < 0 else ''}{difference(abs(fraction))}"


def size(count: float | None) -> str:
    """Bytes, by powers of 1024: 900 · 2**20 → "900 MiB", 2**31 → "2.00 GiB", 300 → "300 bytes"."""
    if count is None or not math.isfinite(count):
        return NOT_MEASURABLE
    for scale, unit in _SIZES:
        if abs(count) >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{number(count)} bytes"


def gib(count: float | None) -> str:
    """Memory of a process or a device, always in GiB, so that runs are comparable: "0.48 GiB"."""
    return NOT_MEASURABLE if count is None or not math.isfinite(count) else f"{_digits(count / 2**30)} GiB"


def factor(ratio: float) -> str:
    """How many times: 1.07 → "1.07", 1.034 → "1.03", 1.62 → "1.6", 14.2 → "14", 0.03 → "0.030"."""
    return f"{ratio:,.{_factor_decimals(ratio)}f}" if ratio else "0"


def factor_within(ratio: float, interval: tuple[float, float] | None) -> tuple[str, str]:
    """A factor and its interval, "2.9" and "2.7–3.1", with the fewest decimals that keep the three distinct.

    The second text is empty if there is no interval.
    """
    if interval is None:
        return factor(ratio), ""
    low, high = interval
    fewest = _factor_decimals(ratio)
    for decimals in range(fewest, max(fewest, 3 if ratio >= 1 else 4) + 1):
        texts = [f"{x:,.{decimals}f}" for x in (low, ratio, high)]
        if len(set(texts)) == 3 and (decimals >= 2 or _keeps_bounds(interval, decimals)):
            break
    return texts[1], f"{texts[0]}–{texts[2]}"


def speed_within(ratio: float, interval: tuple[float, float] | None) -> tuple[str, str]:
    """A ratio of times and its interval, as "times as fast": 0.4, (0.25, 0.5) → "2.5" and "2.0–4.0"."""
    return factor_within(1 / ratio, None if interval is None else (1 / interval[1], 1 / interval[0]))


def speed_figures(ratio: float, interval: tuple[float, float] | None) -> str:
    """As `speed_within`, in one text for a table column: "2.5 (2.0–4.0)"."""
    middle, around = speed_within(ratio, interval)
    return f"{middle} ({around})" if around else middle


def speedup(
    times: float, interval: tuple[float, float] | None = None, words: tuple[str, str] = ("speedup {}", "{} slower")
) -> str:
    """How many times as fast, and its interval: 2.1, (2.0, 2.3) → "speedup 2.1× (2.0–2.3)", 0.5 → "2.0× slower".

    `words`: for factors of at least 1, and for smaller ones; if the second is empty, a factor below 1 is not inverted.
    """
    more, less = words
    if times < 1 and less:
        times, interval = 1 / times, None if interval is None else (1 / interval[1], 1 / interval[0])
        more = less
    middle, around = factor_within(times, interval)
    return f"{more.format(f'{middle}×')}{f' ({around})' if around else ''}"


def _factor_decimals(ratio: float) -> int:
    """Decimals of a factor: two below 1.5, where hundredths matter, fewer above; a small factor has two digits."""
    if 0 < abs(ratio) < 0.1:
        return 1 - math.floor(math.log10(abs(ratio)))
    return 2 if abs(ratio) < 1.495 else 1 if abs(ratio) < 9.95 else 0


def _keeps_bounds(interval: tuple[float, float], decimals: int) -> bool:
    """Whether rounding moves no bound to 0 or 1: that would falsely say that the factor or the direction is open."""
    return not any(x not in (0, 1) and round(x, decimals) in (0, 1) for x in interval)


def rate(per_s: float | None, what: str) -> str:
    """A rate: 1_650.3, "samples" → "1,650 samples/s"."""
    return NOT_MEASURABLE if per_s is None or not math.isfinite(per_s) else f"{_digits(per_s)} {what}/s"


def number(value: float | None) -> str:
    """A count or a mean of counts: 4 → "4", 3.333 → "3.33", 1_234.5 → "1,234"."""
    if value is None or not math.isfinite(value):
        return NOT_MEASURABLE
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 99.95 else _digits(value).rstrip("0").rstrip(".")


def reading(value: float | None, unit: str) -> str:
    """A reading of a meter: 310.04, "W" → "310 W"."""
    return f"{_digits(value)} {unit}".rstrip() if value is not None and math.isfinite(value) else NOT_MEASURABLE


def plural(count: float, noun: str) -> str:
    """A count with its noun: 1, "step" → "1 step", 2 → "2 steps"."""
    return f"{number(count)} {noun}" if count == 1 else f"{number(count)} {noun}s"


def capitalized(words: str) -> str:
    """The words with a capital, for the beginning of a sentence or line: "its state" → "Its state".

    A name in code stays: "train.py, line 3" → "train.py, line 3".
    """
    first = words.split(" ", 1)[0].rstrip(".,:;")
    return words if any(c in "._/\\(" for c in first) else words[:1].upper() + words[1:]


def decapitalized(words: str) -> str:
    """The words as inside a sentence: "Its state" → "its state"; "GPUs", "DataLoader" stay."""
    first = words.split(" ", 1)[0]
    return words[:1].lower() + words[1:] if first[1:] == first[1:].lower() else words


def sentence(words: str) -> str:
    """The words as a full sentence: "half of it waits" → "Half of it waits."; "Really?" is unchanged."""
    return f"{capitalized(words)}." if words and words[-1] not in ".!?" else words


def _digits(value: float) -> str:
    """Three significant digits, two below 1; thousands separated."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.0995 else _significant(value, 2) if value else "0"


def _significant(value: float, digits: int) -> str:
    """A value below 1 with `digits` digits after its leading zeros."""
    return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}"


def plain_values(figures: object) -> Any:
    """Records, mappings and sequences as plain JSON data; a float that JSON cannot hold becomes None."""
    return _finite(msgspec.to_builtins(figures, str_keys=True, enc_hook=_builtin))


def _builtin(value: Any) -> object:
    """Converts types that msgspec does not know: read-only mappings and NumPy scalars."""
    return dict(value) if isinstance(value, Mapping) else value.item()


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def settings_words(settings: Mapping[str, object]) -> str:
    """Settings in the form of `--ab`: "workers=2, amp=bf16"."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def picked(record: object, *names: str) -> dict[str, object]:
    """The named attributes of a record; None for each if there is no record."""
    return {name: None if record is None else getattr(record, name) for name in names}
