"""Which lessons a run of the tests executes as long as readers have them: a minute or two each, so not all."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from datetime import date

from gpulab.lessons.catalogue import LESSONS, Entry
from tests.support.paths import ROOT

MOST_CHANGED = 1  # beside the one in rotation; a change of all of them would take a quarter of an hour


@functools.cache
def whole_lessons() -> frozenset[str]:
    """The names of one that changed since main and one in rotation: by the commit, or by the day without git."""
    head = _git("rev-parse", "HEAD")
    turn = int(head[0], 16) if head else date.today().toordinal()
    return chosen(_changed_files(), turn)


def chosen(changed: Sequence[str], turn: int) -> frozenset[str]:
    """Of changed files and the number of a turn: each number is another lesson's turn."""
    first = turn % len(LESSONS)
    in_turn = (*LESSONS[first:], *LESSONS[:first])
    touched = [entry.name for entry in in_turn[1:] if not _files(entry).isdisjoint(changed)]
    return frozenset({in_turn[0].name, *touched[:MOST_CHANGED]})


def _files(entry: Entry) -> frozenset[str]:
    """What the lesson alone is made of."""
    return frozenset((f"notebooks/lessons/{entry.name}.md", f"gpulab/lessons/{entry.module}.py"))


def _changed_files() -> list[str]:
    """Since the branch left main; on main itself, by the last commit. What is not committed counts."""
    head, fork = (
        _git("rev-parse", "HEAD"),
        _git("merge-base", "HEAD", "origin/main") or _git("merge-base", "HEAD", "main"),
    )
    before = _git("rev-parse", "HEAD~1") if fork in ([], head) else fork
    return _git("diff", "--name-only", before[0]) if before else []


def _git(*words: str) -> list[str]:
    """The lines that it says; none where it fails, as in a folder without history."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return []
    return done.stdout.split() if done.returncode == 0 else []
