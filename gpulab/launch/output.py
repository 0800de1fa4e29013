"""What ranks print: lines of files that grow while their ranks run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct


class Line(Struct, frozen=True):
    """One line of output; `rank` is None for the launcher's own words."""

    rank: int | None
    text: str
    is_error: bool


class GrowingFile:
    """A file that is read as it grows. It need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset_bytes = 0
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """The lines that have come to their end since the last call, as a terminal would leave them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset_bytes)
                new = file.read()
        except OSError:
            return
        if not new:
            return
        self._offset_bytes += len(new)
        *whole, rest = (self._rest + new).split(b"\n")
        self._rest = rest[rest.rstrip(b"\r").rfind(b"\r") + 1 :]  # what a progress bar has written over is gone
        yield from map(_left_standing, whole)

    def rest(self) -> Iterator[str]:
        """The last line where nothing ends it; afterwards it is gone."""
        last, self._rest = self._rest, b""
        if last:
            yield _left_standing(last)


def _left_standing(raw: bytes) -> str:
    """A progress bar writes over itself with carriage returns: only its last state is left."""
    return raw.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
