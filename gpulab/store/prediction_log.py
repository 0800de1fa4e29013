"""Predictions and their measurements, from which later predictions learn how accurate they are.

One line of JSON per prediction, each appended in a single write, so that simultaneous notebooks lose or tear no lines.
A full file is renamed, and the oldest such files are deleted. Damaged lines are skipped and counted.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.store.files import reason
from gpulab.store.folders import default_root
from gpulab.verdict import TOO_FEW, is_decided, verdict

NAME = "scoreboard.jsonl"
FULL_BYTES = 1 * 2**20  # about 2,500 records
MOST_FULL = 3  # files
LONGEST_LINE = 16_384
TRIES = 3
MOST_ERRORS = 100  # of each knob, the latest

_ASIDE = "scoreboard-{moment}-{mark}.jsonl"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """One prediction and its measurement. Ratios are time per unit of work after over before: below 1 is faster.

    `knob` is the name of the change ("workers", "amp + workers"), `value` its settings as a user writes them, `cell` a
    digest of the code; `only_sign`: a range was predicted, its middle is not an estimate.
    """

    when: str  # ISO 8601, UTC
    knob: str
    value: str
    predicted: float
    predicted_interval: tuple[float, float]
    measured: float
    measured_interval: tuple[float, float]
    device: str
    cell: str
    only_sign: bool = False

    @property
    def error(self) -> float:
        """Measured over predicted ratio: 1 is right."""
        return self.measured / self.predicted

    @property
    def conclusive(self) -> bool:
        """Whether the measurement is decided; an undecided one is no evidence about the prediction."""
        return is_decided(verdict(self.measured, self.measured_interval, None, TOO_FEW))

    @property
    def within(self) -> bool:
        """Whether the measured ratio lies in the predicted interval."""
        return self.predicted_interval[0] <= self.measured <= self.predicted_interval[1]


class Board(Struct, frozen=True):
    """All records with a decided measurement, the oldest first, and the number of `undecided` ones.

    `damaged`: number of unreadable lines; `problem`: why a file could not be read.
    """

    records: tuple[Record, ...]
    undecided: int = 0
    damaged: int = 0
    problem: str = ""

    def errors(self, device: str) -> dict[str, tuple[float, ...]]:
        """The latest errors of each knob on a device: measured over predicted ratio, without mere ranges."""
        by_knob: dict[str, list[float]] = {}
        for record in self.records:
            if record.device == device and not record.only_sign:
                by_knob.setdefault(record.knob, []).append(record.error)
        return {knob: tuple(errors[-MOST_ERRORS:]) for knob, errors in by_knob.items()}


class Scoreboard:
    """The records in one folder: by default `$GPULAB_DIR`, else `.gpulab` under the current directory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_root().parent if folder is None else Path(folder).absolute()

    def append(self, records: Iterable[Record]) -> None:
        """Add records. Raises StoreError with the reason; ValueError for a record that could not be read again."""
        lines = [_line(record) for record in records]
        if not lines:
            return
        path = self.folder / NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._put_aside(path)
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
            try:
                for line in lines:  # one write each: the system does not mix the writes of two processes
                    if os.write(handle, line) != len(line):
                        raise OSError("the disk is full")
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as e:
            raise StoreError(f"The scoreboard {str(path)!r} cannot be written: {reason(e)}.") from e

    def read(self) -> Board:
        """All readable records. Never raises, whatever the files hold."""
        for _ in range(TRIES):  # a file renamed meanwhile would be missed
            lines, problem, aside = list[bytes](), "", self._aside()
            for path in (*aside, self.folder / NAME):
                try:
                    lines += path.read_bytes().split(b"\n")
                except FileNotFoundError:
                    continue
                except OSError as e:
                    problem = f"The scoreboard {str(path)!r} cannot be read: {reason(e)}."
            if self._aside() == aside:
                break
        records = [_record(line) for line in lines if line.strip()]
        sound = [record for record in records if record is not None]
        conclusive = sorted((record for record in sound if record.conclusive), key=lambda record: record.when)
        return Board(tuple(conclusive), len(sound) - len(conclusive), len(records) - len(sound), problem)

    def _put_aside(self, path: Path) -> None:
        """Rename a full file. Another process that still writes to it loses no lines: the renamed file is read, too."""
        with contextlib.suppress(FileNotFoundError):  # no such file, or another process was first
            if path.stat().st_size < FULL_BYTES:
                return
            moment = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
            os.rename(path, path.with_name(_ASIDE.format(moment=moment, mark=os.urandom(3).hex())))
        for old in self._aside()[:-MOST_FULL]:
            old.unlink(missing_ok=True)

    def _aside(self) -> list[Path]:
        return sorted(self.folder.glob(_ASIDE.format(moment="*", mark="*")))


def digest(code: str) -> str:
    """A digest of a cell's text, which identifies the cell without storing its code."""
    import hashlib  # with OpenSSL

    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()[:12]


def now() -> str:
    """The current time in the form of `Record.when`."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _line(record: Record) -> bytes:
    """A line with a line break before it, too, so that an interrupted write damages only its own line."""
    encoded = msgspec.json.encode(record)
    if not _sound(record) or len(encoded) > LONGEST_LINE:
        raise ValueError(f"no sound record: {record!r:.200}")
    return b"\n" + encoded + b"\n"


def _record(line: bytes) -> Record | None:
    if len(line) > LONGEST_LINE:
        return None
    try:
        record = msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if _sound(record) else None


def _sound(record: Record) -> bool:
    figures = (record.predicted, *record.predicted_interval, record.measured, *record.measured_interval)
    ordered = all(low <= high for low, high in (record.predicted_interval, record.measured_interval))
    return ordered and all(math.isfinite(x) and x > 0 for x in figures) and bool(record.knob) and bool(record.when)


def errors_here(run: Run) -> Mapping[str, tuple[float, ...]]:
    """The errors of earlier predictions on the run's device."""
    return Scoreboard().read().errors(run.device.name)
