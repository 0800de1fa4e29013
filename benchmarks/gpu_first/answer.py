"""What one part has to say, on disk after every word: a part that is killed keeps what it said before."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict

from benchmarks.conductor import reason_of, write_json

Verdict = Literal["agrees", "disagrees", "not measured"]


class Check(TypedDict):
    """One figure beside its truth, in words that a table can show."""

    what: str
    expected: str
    measured: str
    verdict: Verdict
    note: str


class Contents(TypedDict):
    """What the file holds."""

    simulated: bool
    figures: dict[str, Any]
    checks: list[Check]


class Answer:
    """Figures and checks of one part, written to a file at once."""

    def __init__(self, file: Path, *, simulated: bool) -> None:
        self._file = file
        self.contents: Contents = {"simulated": simulated, "figures": {}, "checks": []}
        self._write()

    def figure(self, name: str, value: object) -> None:
        """Keep a figure: a number, a text, or lists and dictionaries of them."""
        self.contents["figures"][name] = value
        self._write()

    def check(self, what: str, expected: str, measured: str, *, agrees: bool, note: str = "") -> None:
        """Keep a figure that was measured, beside what it must be."""
        self._add(what, expected, measured, "agrees" if agrees else "disagrees", note)

    def unmeasured(self, what: str, expected: str, why: str) -> None:
        """Keep a figure that could not be measured, with the reason."""
        self._add(what, expected, "–", "not measured", why)

    def near(self, what: str, value: float | None, truth: float | None, tolerance: float, unit: str = "") -> None:
        """A value that must be the truth, but for this fraction of it. None is "not measured"."""
        expected = f"{_number(truth)}{unit} ± {tolerance:.0%}"
        if value is None or truth is None:
            return self.unmeasured(what, expected, "gpulab gives no value" if value is None else "the truth is unknown")
        self.check(what, expected, f"{_number(value)}{unit}", agrees=abs(value - truth) <= tolerance * abs(truth))
        return None

    @contextmanager
    def guarded(self, what: str, expected: str) -> Iterator[None]:
        """What fails inside is not measured; the part goes on. The traceback goes to the log."""
        try:
            yield
        except Exception as e:
            traceback.print_exc()
            self.unmeasured(what, expected, reason_of(e))

    def _add(self, what: str, expected: str, measured: str, verdict: Verdict, note: str) -> None:
        row: Check = {"what": what, "expected": expected, "measured": measured, "verdict": verdict, "note": note}
        self.contents["checks"].append(row)
        self._write()

    def _write(self) -> None:
        write_json(self._file, self.contents)


def listed(items: Sequence[str], most: int = 8) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
