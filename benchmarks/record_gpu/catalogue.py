"""Everything that is recorded: the cells of `planted/lessons` with their variants, and planted cells that need a GPU.

A file of a lesson begins with a header in TOML, as a planted cell's does. Fields of the file: `lesson`, `because`,
`steps`, `traced` (steps under the profiler), `limit_s`, `small` (constants and their values where the CPU stands in for
a GPU) and `on_cpu` (edits for the same purpose). Each `[[recording]]` has a `name`, `edits` of the text as written
([old, new], each fits exactly once), perhaps another recording that it is `like` and whose edits come first, and where
its bottleneck is certain the truth: `causes` and `also`, as planted cells have them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.record_gpu.planted_on_cpu import on_cpu
from planted.catalogue import CELLS as PLANTED
from planted.catalogue import FOLDER as ROOT
from planted.catalogue import MARK, Planted, edited, header_and_code, split_at_mark

FOLDER = ROOT / "lessons"
ORDER = (  # the most informative first
    *("workers", "capstone", "precision", "gpt2", "utilization_one_sm", "utilization_full", "batch", "attention"),
    *("launches", "sync", "copies", "stored", "checkpointing", "optimizer", "compiled", "channels_last", "depthwise"),
    *("own_python_line", "search"),
)
STEPS = 60
TRACED_STEPS = 3
LIMIT_S = 40.0
PLANTED_LIMIT_S = 60.0
FRAMEWORKS = {  # and the modules that they need
    "torch": (),
    "lightning": ("lightning",),
    "transformers": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
}
_OF_A_FILE = {"lesson", "because", "steps", "traced", "limit_s", "small", "on_cpu", "recording"}
_OF_A_RECORDING = {"name", "like", "because", "edits", "causes", "also"}


class Recording(Struct, frozen=True):
    """One cell to record. `text` and `small_text`: earlier cells, the mark, and the training cell.

    `causes`: keys of the finding that must come first, the first one exact; empty: healthy; None: nobody knows.
    """

    name: str
    lesson: str  # "03"; empty for a planted cell
    because: str
    text: str
    small_text: str
    causes: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    steps: int = STEPS
    traced: int = TRACED_STEPS
    limit_s: float = LIMIT_S
    needs: tuple[str, ...] = ()  # modules

    def cells(self, *, simulate: bool) -> tuple[str, str]:
        """The earlier cells of the notebook, and the training cell."""
        return split_at_mark(self.small_text if simulate else self.text)

    @property
    def truth(self) -> Planted | None:
        """For judging what the rules say; None where there is no truth."""
        return None if self.causes is None else Planted(self.name, self.causes, self.because, also=self.also)


def read_lesson(path: Path) -> list[Recording]:
    """The recordings of one file. Raises ValueError with the file and what is wrong with it."""
    try:
        header_text, code = header_and_code(path.read_text(encoding="utf-8"))
        header = tomllib.loads(header_text)
        _refuse_others(header, _OF_A_FILE)
        edits: dict[str, list[tuple[str, str]]] = {}
        recordings = []
        for entry in header["recording"]:
            _refuse_others(entry, _OF_A_RECORDING)
            own = [(old, new) for old, new in entry.get("edits", ())]
            edits[entry["name"]] = [*edits[entry["like"]], *own] if "like" in entry else own
            recordings.append(_recording(header, entry, edited(code, edits[entry["name"]], entry["name"])))
        return recordings
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path.name}: {e}") from e


def _recording(header: Mapping[str, Any], entry: Mapping[str, Any], text: str) -> Recording:
    small_text = text
    for constant, value in header.get("small", {}).items():
        small_text, count = re.subn(rf"^{constant} = .*$", f"{constant} = {value}", small_text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"the constant {constant} is set {count} times")
    for old, new in header.get("on_cpu", ()):
        small_text = small_text.replace(old, new)  # a variant may lack it
    return Recording(
        name=entry["name"],
        lesson=header["lesson"],
        because=entry.get("because", header["because"]),
        text=text,
        small_text=small_text,
        causes=tuple(entry["causes"]) if "causes" in entry else None,
        also=tuple(entry.get("also", ())),
        steps=header.get("steps", STEPS),
        traced=header.get("traced", TRACED_STEPS),
        limit_s=header.get("limit_s", LIMIT_S),
    )


def _refuse_others(fields: Iterable[str], allowed: set[str]) -> None:
    others = sorted(set(fields) - allowed)
    if others:
        raise ValueError(f"a header has no field {others[0]!r}")


def planted(cell: Planted) -> Recording:
    """A planted cell that needs a GPU, as a recording."""
    text = MARK.join(cell.text)
    return Recording(
        name=f"planted-{cell.name.removeprefix('gpu_').replace('_', '-')}",
        lesson="",
        because=cell.because,
        text=text,
        small_text=on_cpu(cell.name, text),
        causes=cell.causes,
        also=cell.also,
        steps=cell.profiled,
        limit_s=PLANTED_LIMIT_S,
        needs=(*FRAMEWORKS[cell.framework], *cell.needs),
    )


def every() -> tuple[Recording, ...]:
    """The whole set, in the order in which it is made."""
    files = {path.stem: path for path in FOLDER.glob("*.py")}
    lessons = [recording for stem in ORDER for recording in read_lesson(files.pop(stem))]
    if files:
        raise ValueError(f"{sorted(files)[0]}.py has no place in ORDER")
    return (*lessons, *(planted(cell) for cell in PLANTED if cell.gpu))


def select(names: Sequence[str], recordings: Sequence[Recording]) -> list[Recording]:
    """Those of these names, all without a name. Raises ValueError naming the nearest."""
    by_name = {recording.name: recording for recording in recordings}
    for name in names:
        if name not in by_name:
            near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(by_name)}"
            raise ValueError(f"there is no recording {name!r}; {hint}")
    return [recording for recording in recordings if not names or recording.name in names]
