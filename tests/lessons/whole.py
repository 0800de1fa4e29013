"""Which lessons a run of the tests executes as long as readers have them: a minute or two each, so not all."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from gpulab.lessons.catalogue import LESSONS, Entry
from tests.support.changes import changed_files, turn

MOST_CHANGED = 1  # beside the one in rotation; a change of all of them would take a quarter of an hour


@functools.cache
def whole_lessons() -> frozenset[str]:
    """The names of one that changed since main and one in rotation: by the commit."""
    return chosen(changed_files(), turn())


def chosen(changed: Sequence[str], turn: int) -> frozenset[str]:
    """Of changed files and the number of a turn: each number is another lesson's turn."""
    first = turn % len(LESSONS)
    in_turn = (*LESSONS[first:], *LESSONS[:first])
    touched = [entry.name for entry in in_turn[1:] if not files_of(entry).isdisjoint(changed)]
    return frozenset({in_turn[0].name, *touched[:MOST_CHANGED]})


def files_of(entry: Entry) -> frozenset[str]:
    """What the lesson alone is made of."""
    return frozenset((f"notebooks/lessons/{entry.name}.md", f"gpulab/lessons/{entry.module}.py"))
