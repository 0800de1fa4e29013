"""A learner's progress, a line for each check and guess: stored in the learner's folder, and in that of a class, if
any.

A line has the lesson, the exercise, its result, the guess, the measurement and the time: no code, no path. If the
instructor sets `GPULAB_CLASS`, the same lines also go to that place, one file per learner.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from gpulab.store.files import reason
from gpulab.store.folders import default_root

CLASS_VARIABLE = "GPULAB_CLASS"
FILE = "progress.jsonl"
LEARNER_FILE = "learner.json"
LONGEST_NAME = 40  # characters
ANSWER_S = 2.0
LONGEST_LINE_BYTES = 4_000  # a longer line is not from gpulab
MOST_LINES = 100_000


Figure = Annotated[float, Meta(gt=-1e12, lt=1e12)]


class Line(Struct, frozen=True, omit_defaults=True):
    """One check or guess. `guess` and `measured` are both in per cent, or both factors; None if missing."""

    lesson: Annotated[str, Meta(min_length=1)]
    exercise: str = ""
    kind: str = ""  # "check", "guess", or "opened"
    state: str = ""  # of a check: unanswered, wrong, undecided, right; of a guess: how close it was
    time: str = ""  # ISO 8601, UTC
    guess: Figure | None = None
    measured: Figure | None = None
    unit: str = ""  # of a guess: "%" or "times"
    learner: str = ""  # the name that the learner chose; only in a class

    @property
    def moment(self) -> datetime | None:
        """The time of the line; None if it cannot be read."""
        with suppress(ValueError):
            moment = datetime.fromisoformat(self.time)
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return None


class Learner(Struct, frozen=True):
    """The learner in this folder. `token` separates learners with the same name; a file has both."""

    name: str
    token: Annotated[str, Meta(pattern="^[0-9a-f]{6}$")]

    @property
    def file_name(self) -> str:
        """The learner's file in the class folder: letters, digits and dashes of the name, and the token."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower()[:LONGEST_NAME]
        return f"{slug or 'learner'}-{self.token}.jsonl"


class Outlet:
    """A destination of lines apart from the learner's own file; `words` describe it to the learner."""

    def __init__(self, learner: Learner, words: str) -> None:
        self.learner = learner
        self.words = words
        self._pending: list[Line] = []

    def write(self, line: Line) -> str | None:
        """Write a line; returns the reason of a failure, or None. Unwritten lines are written with the next one."""
        self._pending.append(replace(line, learner=self.learner.name))
        while self._pending:
            problem = self._send(self._pending[0])
            if problem is not None:
                return problem
            del self._pending[0]
        return None

    def rename(self, learner: Learner) -> None:
        """Use that learner's name for further lines."""
        self.learner = learner

    def _send(self, line: Line) -> str | None:
        raise NotImplementedError


class ClassFolder(Outlet):
    """A folder that the whole class can write to, with a file for each learner."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        super().__init__(learner, f"the folder {str(folder)!r}")
        self.folder = folder

    def _send(self, line: Line) -> str | None:
        """Append to the learner's file. A missing folder is not created: that is for the instructor."""
        return _append(self.folder / self.learner.file_name, line)

    def rename(self, learner: Learner) -> None:
        """Rename the learner's file, unless the new name already has a file."""
        before, after = self.folder / self.learner.file_name, self.folder / learner.file_name
        with suppress(OSError):
            if before != after and before.exists() and not after.exists():
                before.rename(after)
        super().rename(learner)


class Progress:
    """The learner's own file, and the outlets of the class. A line that cannot be written stops no lesson."""

    def __init__(self, folder: Path | None = None, outlets: tuple[Outlet, ...] = ()) -> None:
        self.folder = default_root().parent if folder is None else folder
        self.outlets = outlets
        self.problems: dict[str, str] = {}  # the first reason, by place

    @property
    def path(self) -> Path:
        return self.folder / FILE

    def note(self, line: Line) -> list[str]:
        """Write the line everywhere. Returns a sentence for each place that failed for the first time."""
        failures = {"your progress file": self._own(line)}
        failures |= {outlet.words: outlet.write(line) for outlet in self.outlets}
        fresh = {where: why for where, why in failures.items() if why is not None and where not in self.problems}
        for where, why in failures.items():
            if why is None:
                self.problems.pop(where, None)
        self.problems |= fresh
        return [f"Your progress is not written to {where}: {why}. The lesson goes on." for where, why in fresh.items()]

    def _own(self, line: Line) -> str | None:
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        return _append(self.path, line)

    def lines(self) -> list[Line]:
        """The readable lines of the learner's own file, the oldest first."""
        return list(read_lines(self.path))


def now() -> str:
    """The time of a line."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def learner(folder: Path | None = None, name: str | None = None) -> Learner:
    """The learner in this folder; `name` renames. The default name is "learner" and four characters.

    If the folder cannot be written, the token lasts only as long as this process.
    """
    path = (default_root().parent if folder is None else folder) / LEARNER_FILE
    before = Learner("", _TOKEN)
    with suppress(OSError, msgspec.MsgspecError):
        before = msgspec.json.decode(path.read_bytes(), type=Learner)
    plain_name = _plain_name(before.name if name is None else name)
    who = Learner(plain_name or f"learner {before.token[:4]}", before.token)
    if who != before:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.encode(who) + b"\n")
    return who


_TOKEN = os.urandom(3).hex()


def _plain_name(name: str) -> str:
    """The name without control characters, cut to the longest length."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())[:LONGEST_NAME]


class ClassService(Outlet):
    """The board as a service of the JupyterHub that runs this notebook; lines are sent with the notebook's own token.

    The hub says whose token it is, so nobody can write for another user; it has a unique name for each user.
    """

    def __init__(self, url: str, token: str, learner: Learner) -> None:
        super().__init__(learner, "the board of this hub")
        self.url = url
        self._token = token

    def _send(self, line: Line) -> str | None:
        """Post the line; gives up after two seconds without an answer."""
        request = urllib.request.Request(
            self.url.rstrip("/") + "/lines",
            data=msgspec.json.encode(line),
            headers={"Authorization": f"token {self._token}", "Content-Type": "application/json"},
            method="POST",
        )
        try:
            with _DIRECT.open(request, timeout=ANSWER_S):
                return None
        except urllib.error.HTTPError as e:
            return f"the hub refuses it ({e.code} {e.reason})"
        except (OSError, ValueError) as e:
            return reason(e)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that the token goes only to the instructor's address."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


def class_outlets(who: Learner, environment: Mapping[str, str] = os.environ) -> tuple[Outlet, ...]:
    """The further destinations of lines that the instructor set; none unless `GPULAB_CLASS` is set.

    A folder, or the address of the board's service if JupyterHub runs this notebook.
    """
    where = environment.get(CLASS_VARIABLE, "").strip()
    if not where:
        return ()
    if where.startswith(("http://", "https://")):
        return (ClassService(where, environment.get("JUPYTERHUB_API_TOKEN", ""), who),)
    return (ClassFolder(Path(where).expanduser().absolute(), who),)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, which others may be writing. Other content is skipped; a missing file has no lines."""
    with suppress(OSError), path.open("rb") as file:
        for _ in range(MOST_LINES):
            content = file.readline(LONGEST_LINE_BYTES)
            if not content:
                return
            line = parsed(content)
            if line is not None:
                yield line


def parsed(content: bytes | str) -> Line | None:
    """A line parsed from a file; None for other content."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(content, type=Line)
    return None


def _append(path: Path, line: Line) -> str | None:
    """Append a whole line in one write, so that lines are not mixed. Returns the reason of a failure, or None."""
    try:
        content = msgspec.json.encode(line) + b"\n"
        with path.open("ab", buffering=0) as file:
            count = file.write(content)
            if count != len(content):  # undo, so that the next try begins a line
                file.truncate(file.tell() - count)
                return "the disk is full"
    except OSError as e:
        return reason(e)
    return None
