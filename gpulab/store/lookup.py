"""Finds runs in a list by id, name, position or conditions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

from msgspec import Struct

from gpulab.errors import StoreError, UsageError
from gpulab.run import Job, Outcome, Run

_LONGEST_NAME = 100
_AGE = re.compile(r"(\d{1,9})\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Entry(Struct, frozen=True):
    """One run of a list, from its header. With a `problem`, only `id` and `path` are valid.

    `name` is the user's name or else the id; `run` is set if it was read or is in memory. An entry may represent a job
    of several ranks: then it is the entry of the lowest rank, with the job's `id`, the newest `position` and all
    `outcomes`.
    """

    id: str
    path: Path | None = None  # None: not saved
    name: str = ""
    created: str = ""  # ISO 8601
    outcome: Outcome | None = None
    device_kind: str = ""
    job: Job | None = None
    problem: str | None = None
    run: Run | None = None  # its timeline may be left out
    position: int | None = None  # among all runs, counted from the end: runs[position]
    outcomes: tuple[str, ...] = ()  # of all stored ranks
    runs: int = 1  # that this entry represents


def select(entries: Sequence[Entry], key: str) -> Entry | None:
    """By id, position from the end, name, or unique beginning of an id, in this order; of several, the last."""
    exact = [e for e in entries if e.id == key]
    if exact:
        return exact[-1]
    position = 1 if key == "latest" else int(key[1:]) if re.fullmatch(r"-[0-9]{1,9}", key) else 0
    if position:
        return entries[-position] if position <= len(entries) else None
    matches = [e for e in entries if e.name == key]
    if matches:
        return matches[-1]
    starting = [e for e in entries if key and e.id.startswith(key)]
    return starting[0] if len(starting) == 1 else None


def why_none(entries: Sequence[Entry], key: str, root: Path) -> str:
    """Why `select` found none, with the nearest key: a sentence for the user."""
    starting = [e.id for e in entries if key and e.id.startswith(key)]
    if starting:
        return f"{key!r} matches {len(starting)} runs: {', '.join(starting[:4])}. Give more characters."
    if not entries:
        return f"There is no run in {str(root)!r} yet: profile something first."
    if re.fullmatch(r"-\d+", key):
        return f"There is no run {key}: {str(root)!r} holds {len(entries)}."
    names = [brief(e.name) for e in entries] + [e.id for e in entries]
    nearest = difflib.get_close_matches(brief(key), names, n=1, cutoff=0.5)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else "`gpulab runs` lists them."
    return f"There is no run {brief(key)!r} in {str(root)!r}. {hint}"


def brief(name: str) -> str:
    """A name for a sentence, cut to 100 characters: very long names take minutes to compare and pages to print."""
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


class Filter(Struct, frozen=True):
    """All conditions must hold; an empty condition always holds.

    `name` is a pattern (`*`, `?`, `[…]`, case-sensitive) for the whole name or id. `words` must all occur, in any case,
    in the name, id, code, device, dataset, error or knobs ("workers=4") of a run.
    """

    name: str = ""
    device: str = ""
    since: datetime | None = None
    outcome: str = ""
    words: tuple[str, ...] = ()

    def fits(self, entry: Entry) -> bool:
        """Whether all conditions except the words hold."""
        return (
            (not self.name or fnmatchcase(entry.name, self.name))
            and (not self.device or entry.device_kind == self.device)
            and (not self.outcome or entry.outcome == self.outcome)
            and is_within(entry.created, self.since)
        )

    def fits_words(self, run: Run) -> bool:
        """Whether the words occur in the run."""
        dataset = run.loader.dataset if run.loader is not None else ""
        knobs = (f"{knob}={value}" for knob, value in run.settings.knobs.items())
        texts = (run.name, run.id, run.code, run.device.name, run.outcome_detail, run.source, dataset, *knobs)
        text = "\n".join(texts).casefold()
        return all(word.casefold() in text for word in self.words)

    def __str__(self) -> str:
        """The conditions in words."""
        since = f"{self.since:%Y-%m-%d %H:%M}" if self.since is not None else ""
        conditions = {"name": self.name, "device": self.device, "since": since, "outcome": self.outcome}
        parts = [f"{what} {value}" for what, value in conditions.items() if value]
        return ", ".join([*parts, *(f"{word!r}" for word in self.words)])


def make_filter(
    name: str, device: str, since: str | datetime | timedelta | None, outcome: str, words: Sequence[str] | str
) -> Filter:
    """A filter from a user's values. Raises UsageError naming the value and the nearest valid one."""
    if device not in ("", "cpu", "cuda"):
        raise UsageError(f"The device must be cpu or cuda, got {brief(device)!r}.")
    outcomes: tuple[str, ...] = get_args(Outcome)
    if outcome and outcome not in outcomes:
        near = difflib.get_close_matches(brief(outcome).lower(), outcomes, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"The outcome must be one of {', '.join(outcomes)}, got {brief(outcome)!r}. Did you mean {near}?"
        )
    every = words.split() if isinstance(words, str) else filter(None, words)
    return Filter(name, device, since_when(since) if since else None, outcome, tuple(every))


def since_when(since: str | datetime | timedelta) -> datetime:
    """A moment from a date, a date and a time (this machine's zone unless it names one), or an age before now.

    Raises UsageError for anything else.
    """
    try:
        if isinstance(since, datetime):
            return since.astimezone()
        if isinstance(since, timedelta):
            return datetime.now(UTC) - since
        age = _AGE.fullmatch(since.strip())
        if age is not None:
            return datetime.now(UTC) - timedelta(seconds=int(age[1]) * _SECONDS[age[2]])
        return datetime.fromisoformat(since.strip()).astimezone()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{brief(str(since))!r} is neither a date (2026-11-20) nor an age (30m, 2h, 3d, 1w)."
        ) from None


def moment(created: str) -> datetime:
    """When a run was made. Raises StoreError if its date is invalid."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        raise StoreError(f"run.json has no date: {created!r}") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def is_within(created: str, since: datetime | None, until: datetime | None = None) -> bool:
    """Whether a run was made at or after `since` and before `until`; None: no such limit."""
    if since is None and until is None:
        return True
    try:
        when = moment(created)
    except StoreError:  # a run whose date cannot be read
        return False
    return (since is None or when >= since) and (until is None or when < until)
