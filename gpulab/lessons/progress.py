"""What a learner did, a line for each check and guess: kept in their own folder, and in the class's where there is one.

A line has the lesson, the exercise, what came of it, the guess, the measurement and the time: no code, no path. With
`GPULAB_CLASS` set, which only the instructor does, the same lines also go where it says, one file per learner.
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
LONGEST_LINE_BYTES = 4_000  # a longer one is none of ours
MOST_LINES = 100_000


Figure = Annotated[float, Meta(gt=-1e12, lt=1e12)]


class Line(Struct, frozen=True, omit_defaults=True):
    """One check or guess. `guess` and `measured` are both in per cent, or both factors; None where there is none."""

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
        """None where the line has no time that can be read."""
        with suppress(ValueError):
            moment = datetime.fromisoformat(self.time)
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return None


class Learner(Struct, frozen=True):
    """Who works here. `token` keeps two learners of one name apart; both stand in a file of this folder."""

    name: str
    token: Annotated[str, Meta(pattern="^[0-9a-f]{6}$")]

    @property
    def file_name(self) -> str:
        """Of the class folder: letters, digits and dashes of the name, and the token."""
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower()[:LONGEST_NAME]
        return f"{slug or 'learner'}-{self.token}.jsonl"


class Outlet:
    """Where lines go beside the learner's own file; `words` say it to the learner."""

    def __init__(self, learner: Learner, words: str) -> None:
        self.learner = learner
        self.words = words
        self._pending: list[Line] = []

    def write(self, line: Line) -> str | None:
        """Why it could not, or None. What could not be written goes with the next line."""
        self._pending.append(replace(line, learner=self.learner.name))
        while self._pending:
            problem = self._send(self._pending[0])
            if problem is not None:
                return problem
            del self._pending[0]
        return None

    def rename(self, learner: Learner) -> None:
        """From here on the lines are of that name."""
        self.learner = learner

    def _send(self, line: Line) -> str | None:
        raise NotImplementedError


class ClassFolder(Outlet):
    """A folder that the whole class can write to, with a file for each learner."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        super().__init__(learner, f"the folder {str(folder)!r}")
        self.folder = folder

    def _send(self, line: Line) -> str | None:
        """A folder that is not there is not made: the instructor makes it."""
        return _append(self.folder / self.learner.file_name, line)

    def rename(self, learner: Learner) -> None:
        """What was written under the name before belongs to the new one, unless that has a file already."""
        before, after = self.folder / self.learner.file_name, self.folder / learner.file_name
        with suppress(OSError):
            if before != after and before.exists() and not after.exists():
                before.rename(after)
        super().rename(learner)


class Progress:
    """The learner's own file, and the outlets of the class. A line that cannot be written stops nothing."""

    def __init__(self, folder: Path | None = None, outlets: tuple[Outlet, ...] = ()) -> None:
        self.folder = default_root().parent if folder is None else folder
        self.outlets = outlets
        self.problems: dict[str, str] = {}  # by where, the first reason

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
        """The learner's own, the oldest first; without what cannot be read."""
        return list(read_lines(self.path))


def now() -> str:
    """The time of a line."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def learner(folder: Path | None = None, name: str | None = None) -> Learner:
    """Who works in this folder; `name` renames. Who has chosen none is "learner" and four characters.

    Where the folder cannot be written, the token lasts as long as this process.
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
    """Without control characters, which no screen shows, and not too long."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())[:LONGEST_NAME]


class ClassService(Outlet):
    """The board as a service of the JupyterHub that runs this notebook: lines go there with the notebook's own token.

    The hub says whose token it is, so nobody can write for another; it has a name of its own for each user.
    """

    def __init__(self, url: str, token: str, learner: Learner) -> None:
        super().__init__(learner, "the board of this hub")
        self.url = url
        self._token = token

    def _send(self, line: Line) -> str | None:
        """A hub that does not answer within two seconds keeps nobody waiting longer."""
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
    """The token goes nowhere but where the instructor said."""

    def redirect_request(self, *_: object, **__: object) -> None:
        return None


_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))


def class_outlets(who: Learner, environment: Mapping[str, str] = os.environ) -> tuple[Outlet, ...]:
    """Where the instructor wants the lines to go as well: nowhere, unless `GPULAB_CLASS` is set.

    A folder, or the address of the board's service where JupyterHub runs this notebook.
    """
    where = environment.get(CLASS_VARIABLE, "").strip()
    if not where:
        return ()
    if where.startswith(("http://", "https://")):
        return (ClassService(where, environment.get("JUPYTERHUB_API_TOKEN", ""), who),)
    return (ClassFolder(Path(where).expanduser().absolute(), who),)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, which others may be writing. What is no line of ours is left out; no file has none."""
    with suppress(OSError), path.open("rb") as file:
        for _ in range(MOST_LINES):
            content = file.readline(LONGEST_LINE_BYTES)
            if not content:
                return
            line = parsed(content)
            if line is not None:
                yield line


def parsed(content: bytes | str) -> Line | None:
    """A line of a file; None for what is none."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(content, type=Line)
    return None


def _append(path: Path, line: Line) -> str | None:
    """One write of a whole line, so that no other's stands in it. Why it failed, or None."""
    try:
        content = msgspec.json.encode(line) + b"\n"
        with path.open("ab", buffering=0) as file:
            count = file.write(content)
            if count != len(content):  # nothing of it, so that the next try begins a line
                file.truncate(file.tell() - count)
                return "the disk is full"
    except OSError as e:
        return reason(e)
    return None
