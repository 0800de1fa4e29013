"""What changed since main, and whose turn it is: for tests that take a minute and guard what seldom changes."""

from __future__ import annotations

import functools
import subprocess
from datetime import date

import pytest

from tests.support.paths import ROOT

ONE_IN = 4


def where_changed(*folders: str) -> pytest.MarkDecorator:
    """Run where a file in one of these folders changed, and at one commit in four, by its number."""
    return pytest.mark.skipif(not is_due(*folders), reason=f"{', '.join(folders)}: unchanged, and not its turn")


def in_turn(number: int, *folders: str, of: int = 2) -> pytest.MarkDecorator:
    """One of cases that are much alike: at each commit one in so many runs; where changed, all."""
    due = changed_in(*folders) or (number + turn()) % of == 0
    return pytest.mark.skipif(not due, reason=f"{', '.join(folders)}: unchanged, and at other commits")


def changed_in(*folders: str) -> bool:
    return any(file.startswith(folders) for file in changed_files())


def is_due(*folders: str) -> bool:
    return changed_in(*folders) or turn() % ONE_IN == 0


def turn() -> int:
    """A number of the commit, or of the day without git."""
    head = _git("rev-parse", "HEAD")
    return int(head[0], 16) if head else date.today().toordinal()


@functools.cache
def changed_files() -> list[str]:
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
