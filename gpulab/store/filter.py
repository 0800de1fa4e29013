"""Which runs of a table are meant: by name, device, age, outcome, or words that occur in them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Protocol, get_args

from msgspec import Struct

from gpulab.errors import StoreError, UsageError
from gpulab.run import Outcome, Run
from gpulab.store.folders import moment
from gpulab.store.lookup import Named, shown

DEVICE_KINDS = ("cpu", "cuda")
OUTCOMES: tuple[str, ...] = get_args(Outcome)

_AGE = re.compile(r"(\d{1,9})\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Listed(Named, Protocol):
    """What a filter asks of a run without reading all of it; `created` is ISO 8601."""

    @property
    def created(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def outcome(self) -> str | None: ...


class Filter(Struct, frozen=True):
    """All conditions must hold; an empty one always does.

    `name` is a pattern (`*`, `?`, `[…]`, capital letters matter) for the whole name or id. `words` must all occur, in
    any capitals, somewhere in the name, id, code, device, dataset, error or knobs ("workers=4") of a run.
    """

    name: str = ""
    device: str = ""
    since: datetime | None = None
    outcome: str = ""
    words: tuple[str, ...] = ()

    def fits(self, run: Listed) -> bool:
        """Whether all but the words are right."""
        return (
            (not self.name or fnmatchcase(run.name, self.name))
            and (not self.device or run.device_kind == self.device)
            and (not self.outcome or run.outcome == self.outcome)
            and (self.since is None or _is_since(run.created, self.since))
        )

    def fits_words(self, run: Run) -> bool:
        """Whether the words occur in it."""
        dataset = run.loader.dataset if run.loader is not None else ""
        knobs = (f"{knob}={value}" for knob, value in run.settings.knobs.items())
        texts = (run.name, run.id, run.code, run.device.name, run.outcome_detail, run.source, dataset, *knobs)
        text = "\n".join(texts).casefold()
        return all(word.casefold() in text for word in self.words)

    def __str__(self) -> str:
        """As a user would write it, in words."""
        since = f"{self.since:%Y-%m-%d %H:%M}" if self.since is not None else ""
        asked = {"name": self.name, "device": self.device, "since": since, "outcome": self.outcome}
        parts = [f"{what} {value}" for what, value in asked.items() if value]
        return ", ".join([*parts, *(f"{word!r}" for word in self.words)])


def make(
    name: str = "",
    device: str = "",
    since: str | datetime | timedelta | None = None,
    outcome: str = "",
    words: Sequence[str] | str = (),
) -> Filter:
    """A filter from what a user gave. Raises UsageError naming the value and the nearest valid one."""
    if device and device not in DEVICE_KINDS:
        raise UsageError(f"The device must be {' or '.join(DEVICE_KINDS)}, got {shown(device)!r}.")
    if outcome and outcome not in OUTCOMES:
        near = difflib.get_close_matches(shown(outcome).lower(), OUTCOMES, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"The outcome must be one of {', '.join(OUTCOMES)}, got {shown(outcome)!r}. Did you mean {near}?"
        )
    wanted = words.split() if isinstance(words, str) else [w for w in words if w]
    return Filter(name, device, since_when(since) if since else None, outcome, tuple(wanted))


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
            f"{shown(str(since))!r} is neither a date (2026-11-20) nor an age (30m, 2h, 3d, 1w)."
        ) from None


def _is_since(created: str, since: datetime) -> bool:
    try:
        return moment(created) >= since
    except StoreError:  # a run of this process whose date is of another program
        return False
