"""The folder of a set of recordings: OUT/MACHINE/NAME, and beside it the few files that say what became of them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.record_gpu.catalogue import Recording
from gpulab.store import folders

DOCUMENT = "recording.json"  # written last: a folder that has it is whole
SIMULATED = "simulated"  # the machine's name where the CPU stood in for a GPU
_NO_NAME = re.compile(r"nvidia|tesla|geforce|amd|instinct|graphics|device|gpu|\d+gb|hbm\d\w*|sxm\d*")


class Outlet(Struct, frozen=True):
    """Where recordings are written. `brief` gets at most eight files: tables, the log, and all recordings packed."""

    path: Path
    brief: Path

    @property
    def results(self) -> Path:
        """Everything about this call, for programs."""
        return self.brief / "results.json"

    @property
    def table(self) -> Path:
        """The same for people."""
        return self.brief / "table.md"

    @property
    def log(self) -> Path:
        """What the cells have printed."""
        return self.brief / "log.txt"

    def folder(self, machine: str, name: str) -> Path:
        """Of one recording."""
        return self.path / machine / name

    def whole(self, recording: Recording, machine: str) -> bool:
        """Whether it is there, can be read, and is of the cell as it is now."""
        return shortcoming(self.folder(machine, recording.name), recording, simulate=machine == SIMULATED) is None

    def folders(self) -> Iterator[Path]:
        """All that look like recordings, in the order of their names."""
        yield from sorted(file.parent for file in self.path.glob(f"[!.]*/[!.]*/{DOCUMENT}"))

    def sweep(self) -> None:
        """Take away what a call that was killed has left half done."""
        for folder in self.path.glob(".making-*"):
            shutil.rmtree(folder, ignore_errors=True)


def shortcoming(folder: Path, recording: Recording | None = None, *, simulate: bool = False) -> str | None:
    """Why a folder is no whole recording; None where it is one."""
    document = document_of(folder)
    if document is None:
        return f"it has no readable {DOCUMENT}"
    if recording is not None and [document.get("earlier"), document.get("cell")] != [
        *recording.cells(simulate=simulate)
    ]:
        return "its cell has been changed since"
    problem = folders.entry_in(folder).problem
    if problem is not None:
        return problem
    lacking = [name for name in document["files"] if not (folder / name).is_file()]
    return f"it has no {lacking[0]}" if lacking else None


def document_of(folder: Path) -> dict[str, Any] | None:
    """What `recording.json` says; None where there is none."""
    try:
        document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and isinstance(document.get("files"), list) else None


def machine_of(device: str) -> str:
    """A folder's name for a GPU: "NVIDIA H100 80GB HBM3" is h100, "NVIDIA GeForce RTX 4090" is rtx-4090."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return "-".join(word for word in words if not _NO_NAME.fullmatch(word)) or "gpu"


def size_of(folder: Path) -> int:
    """Bytes of all its files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
