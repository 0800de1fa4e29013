"""The one line that takes most of some time, or the loop that it stands in, where looks at the stack surely show it.

Each look is one draw: a line is named where it has at least half of all looks, and where its lead over the next is more
than chance. Where no single line does, the innermost statement or loop is named by its first line, if the looks in it
together do. Else none: the tool rather says nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from gpulab.run import Place, Run, Unit

LEAST_SHARE = 0.5  # ours: below half of the time nothing is the hot line
FEWEST_LOOKS = 4  # of 4 looks all at one line, its share lies above a half in 95 of 100 cases
FEWEST_IN_LEAD = 20  # ours: of a line with less than half of the looks
_Z = 1.96


class Counted(Protocol):
    """A line of the user's, and how many looks have met it."""

    @property
    def place(self) -> Place: ...

    @property
    def looks(self) -> int: ...


class LineCount(Struct, frozen=True):
    """The plainest of these."""

    place: Place
    looks: int


def hot_place(lines: Sequence[Counted], total: int) -> Place | None:
    """The line, else the statement or loop, that surely takes at least half of the time of these `total` looks."""
    counts = sorted(_joined(lines), key=lambda line: -line.looks)
    if not counts:
        return None
    second = counts[1].looks if len(counts) > 1 else 0
    if is_clear(counts[0].looks, second, total):
        return counts[0].place
    return _hot_unit(counts, total)


def _joined(lines: Iterable[Counted]) -> Iterable[Counted]:
    """A line and the comprehensions and lambdas written in it are one, at the place that most looks have met."""
    joined: dict[tuple[str, int], LineCount] = {}
    for line in sorted(lines, key=lambda line: -line.looks):
        at = line.place.file, line.place.line
        before = joined.get(at, LineCount(line.place, 0))
        joined[at] = LineCount(before.place, before.looks + line.looks)
    return joined.values()


def is_clear(first: int, second: int, total: int) -> bool:
    """Whether so many looks are at least half of all, and surely more than those of the next."""
    return first >= FEWEST_LOOKS and first >= LEAST_SHARE * total and lower_share(first, first + second) > LEAST_SHARE


def lower_share(part: int, whole: int) -> float:
    """The lower end of the 95 % interval (Wilson's) of a share that was counted."""
    if not whole:
        return 0.0
    p, z2 = part / whole, _Z * _Z
    spread = _Z * math.sqrt(p * (1 - p) / whole + z2 / (4 * whole * whole))
    return (p + z2 / (2 * whole) - spread) / (1 + z2 / whole)


def _hot_unit(counts: Sequence[Counted], total: int) -> Place | None:
    """The smallest statement or loop whose lines together are clear."""
    for (file, unit), members in sorted(_units(counts).items(), key=lambda item: item[0][1].last - item[0][1].first):
        inside = sum(line.looks for line in members)
        beside = max((line.looks for line in counts if line not in members), default=0)
        if is_clear(inside, beside, total):
            return Place(file, unit.first, members[0].place.function, unit.text)
    return None


def _units(counts: Iterable[Counted]) -> Mapping[tuple[str, Unit], list[Counted]]:
    units: dict[tuple[str, Unit], list[Counted]] = defaultdict(list)
    for line in counts:
        for unit in line.place.units:
            units[line.place.file, unit].append(line)
    return units


# Which line takes the time to make batches, from looks at those who make them.


def loading_lines(run: Run, *, collating: bool = False) -> tuple[tuple[LineCount, ...], int]:
    """The lines of the user's that were met, most looks first, and how many looks there were in all.

    `collating`: only within `collate_fn`.
    """
    looks = run.loading_looks
    if looks is None:
        return (), 0
    wanted = looks.collating == 1 if collating else np.ones(len(looks), bool)
    lines = [
        LineCount(run.places[place], int(looks.count[wanted & (looks.place == place)].sum()))
        for place in np.unique(looks.place[wanted]).tolist()
        if place >= 0
    ]
    return tuple(sorted(lines, key=lambda line: -line.looks)), int(looks.count[wanted].sum())


def hot_line_of_loading(run: Run, *, collating: bool = False) -> Place | None:
    """The line, or the loop, that surely takes at least half of that time; else the line that leads surely with a third
    of it, for other programs make all lines longer but one that sleeps. None where none does.
    """
    lines, total = loading_lines(run, collating=collating)
    hot = hot_place(lines, total)
    if hot is not None or not lines:
        return hot
    first, second = lines[0].looks, lines[1].looks if len(lines) > 1 else 0
    leads = first >= FEWEST_IN_LEAD and 3 * first >= total and lower_share(first, first + second) > LEAST_SHARE
    return lines[0].place if leads else None
