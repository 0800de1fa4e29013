"""What a meter is, so that the sampling process reads a GPU, a process tree and a scripted fake in the same way.

A meter gives one value per series and reading. A value that cannot be read is None, never 0. A series that fails when
the meter opens is not offered and is listed as missing; one that starts failing later is given up after
`FAILURES_UNTIL_LOST` readings and listed as missing since the first of them. No reading ever raises.

This module and the meters import neither NumPy nor torch: the sampling process must start fast and stay small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from gpulab.live_feed import SeriesInfo

FAILURES_UNTIL_LOST = 3


class Unavailable(Struct, frozen=True):
    """A series that cannot be read. `since_ns` (`time.perf_counter_ns`) is None where it never could."""

    what: str
    reason: str
    since_ns: int | None = None


class Failure(Struct, frozen=True):
    """An answer that is no value, with its reason."""

    reason: str


Answer = float | Failure | None  # None: nothing new this time
Reasoner = Callable[[Exception], str]


class Query:
    """One call that answers one or more series, with the failures of each counted apart."""

    def __init__(
        self, series: Sequence[SeriesInfo], ask: Callable[[], Sequence[Answer]], reason_of: Reasoner = str
    ) -> None:
        self.series = tuple(series)
        self._ask = ask
        self._reason_of = reason_of
        self._answered = [False] * len(self.series)
        self._failures = [0] * len(self.series)
        self._failing_since = [0] * len(self.series)
        self.lost: dict[int, Unavailable] = {}  # by position in `series`

    def opens(self) -> Unavailable | None:
        """Ask once; the reason where the whole query is refused at its start."""
        try:
            answers = self._ask()
        except Exception as e:  # a refused query must not cost the others
            return Unavailable(self._what(), self._reason_of(e))
        failures = [a for a in answers if isinstance(a, Failure)]
        return Unavailable(self._what(), failures[0].reason) if len(failures) == len(self.series) else None

    def read(self) -> list[float | None]:
        """The values, None where there is none; a lost series is not asked for again."""
        if len(self.lost) == len(self.series):
            return [None] * len(self.series)
        try:
            answers = self._ask()
        except Exception as e:
            answers = [Failure(self._reason_of(e))] * len(self.series)
        return [self._take(i, answer) for i, answer in enumerate(answers)]

    def _take(self, i: int, answer: Answer) -> float | None:
        if i in self.lost or answer is None:
            return None
        if isinstance(answer, Failure):
            self._count(i, answer.reason)
            return None
        self._answered[i] = True
        self._failures[i] = 0
        return answer

    def _count(self, i: int, reason: str) -> None:
        if self._failures[i] == 0:
            self._failing_since[i] = time.perf_counter_ns()
        self._failures[i] += 1
        if self._failures[i] == FAILURES_UNTIL_LOST:
            since = self._failing_since[i] if self._answered[i] else None
            self.lost[i] = Unavailable(self.series[i].label, reason, since)

    def _what(self) -> str:
        return ", ".join(s.label for s in self.series)


class Meter:
    """An instrument made of queries: those refused at the start are missing, the others are read in turn.

    Used by one thread.
    """

    def __init__(
        self, queries: Sequence[Query], missing: Sequence[Unavailable] = (), close: Callable[[], None] | None = None
    ) -> None:
        refused = [(q, q.opens()) for q in queries]
        self._queries = [q for q, why in refused if why is None]
        self._refused = (*missing, *(why for _, why in refused if why is not None))
        self._close = close

    def series(self) -> tuple[SeriesInfo, ...]:
        """What is read, in the order of the values of `read`."""
        return tuple(s for q in self._queries for s in q.series)

    def read(self) -> list[float | None]:
        """One value per series; None where there is none this time."""
        return [value for q in self._queries for value in q.read()]

    def missing(self) -> tuple[Unavailable, ...]:
        """What cannot be read and why; grows when a series is lost in the middle."""
        return (*self._refused, *(why for q in self._queries for why in q.lost.values()))

    def close(self) -> None:
        """Give back what the meter holds. May be called twice."""
        close, self._close = self._close, None
        if close is not None:
            close()
