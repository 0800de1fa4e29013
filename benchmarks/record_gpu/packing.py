"""All recordings in a few files: what can be brought back from a machine that hands out eight files of 16 MiB."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.record_gpu.outlet import DOCUMENT, size_of

PACK_BYTES = 15_000_000  # of the recordings in one file, which is smaller: it is compressed
PATTERN = "recordings-*.tar.gz"


class Packer:
    """Packs folders, in their order, into recordings-1.tar.gz and so on. Only what has changed is written again."""

    def __init__(self, target: Path, limit_bytes: int = PACK_BYTES) -> None:
        self._target = target
        self._limit_bytes = limit_bytes
        self._packed: dict[Path, list[tuple[Path, int, int]]] = {}

    def pack(self, folders: Iterable[Path]) -> list[Path]:
        """The files, each whole at any moment."""
        files = []
        for number, chunk in enumerate(self._chunks(folders), start=1):
            file = self._target / f"recordings-{number}.tar.gz"
            contents = [(folder, size_of(folder), (folder / DOCUMENT).stat().st_mtime_ns) for folder in chunk]
            if self._packed.get(file) != contents or not file.exists():
                self._write(file, chunk)
                self._packed[file] = contents
            files.append(file)
        for file in set(self._target.glob(PATTERN)) - set(files):
            file.unlink()
        return files

    def _chunks(self, folders: Iterable[Path]) -> list[list[Path]]:
        chunks: list[list[Path]] = []
        room = 0
        for folder in folders:
            size = size_of(folder) + 20_000  # of the archive's own
            if not chunks or size > room:
                chunks.append([])
                room = self._limit_bytes
            chunks[-1].append(folder)
            room -= size
        return chunks

    def _write(self, file: Path, folders: list[Path]) -> None:
        unfinished = file.with_name(f".{file.name}.new")
        with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
            for folder in folders:
                archive.add(folder, f"{folder.parent.name}/{folder.name}")
        os.replace(unfinished, file)


def unpack(source: Path, target: Path) -> list[str]:
    """Take out of all packed files what is not in the target folder yet; the names of what cannot be read.

    A file that is torn gives what comes before the tear.
    """
    torn = []
    for file in sorted(source.glob(PATTERN)):
        try:
            with tarfile.open(file) as archive:
                _extract(archive, target)
        except (tarfile.TarError, OSError, EOFError) as e:
            torn.append(f"{file.name}: {e}")
    return torn


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    there = {file.parent for file in target.glob(f"*/*/{DOCUMENT}")}
    for member in archive:
        if (target / member.name).parent not in there and member.isfile():
            archive.extract(member, target, filter="data")
