"""Finds the user's own lines in a stack, and names them as the user sees them.

Only names and numbers of a frame are stored, but no frame, code object or other object of the user's code.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

from gpulab.capture.stack_reader import Spot, Stack
from gpulab.run import Excerpt, Place, Unit
from gpulab.user_code import CELL_WITHOUT_IPYTHON, Owner, ipython_cells, is_cell, owners

Lines = tuple[int, int]  # first and last

CELL = "cell"
_LONGEST = 200  # characters of a line
_LONGEST_SOURCE = 50_000  # lines: a longer one is not parsed
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_COMPOUND = (*_LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
AROUND = 4  # lines of an excerpt above and below a line


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The user's own frames from this one outwards, up to the frame that runs the user's code."""
    while frame is not None and (owner := owners[frame.f_code.co_filename]) is not Owner.RUNNER:
        if owner is Owner.USER:
            yield frame
        frame = frame.f_back


def users_stack(frame: FrameType | None) -> Stack:
    """All of the user's lines from this frame outwards, innermost first."""
    return tuple(map(_spot_of, users_frames(frame)))


def users_spot(frame: FrameType | None) -> Spot | None:
    """The user's innermost line from this frame outwards; None without any."""
    return next(map(_spot_of, users_frames(frame)), None)


def _spot_of(frame: FrameType) -> Spot:
    return frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno, frame.f_code.co_qualname


class Naming:
    """Makes a `Place` of each spot at the end of the run.

    `code` is the text of the profiled cell. In the cell that the user sees, `above` lines (the magic) precede it, and
    line numbers count these.
    """

    def __init__(self, code: str, above: int, step_lines: Iterable[Spot] = ()) -> None:
        self.code, self.above = code, above
        self._code = code.splitlines()
        self._step_lines = {(file, line) for file, line, _ in step_lines}
        self._excerpts: dict[tuple[str, int], str] = {}
        self._places: dict[Place, int] = {}
        self._numbers: dict[Spot, int] = {}

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(self._places)

    def number(self, spot: Spot | None) -> int:
        """The position of this spot's place among `places`; -1 for none."""
        if spot is None:
            return -1
        if spot not in self._numbers:
            self._numbers[spot] = self._places.setdefault(self._place(*spot), len(self._places))
        return self._numbers[spot]

    def words(self, spot: Spot | None) -> str:
        """The place in words, without adding it to `places`; empty for none."""
        return "" if spot is None else str(self._place(*spot))

    def excerpt(self, spot: Spot) -> None:
        """Record the source around this line."""
        file, line, _ = spot
        name, lines, above = self._source(file)
        first, last = max(1, line - AROUND), min(len(lines), line + AROUND)
        for number in range(first, last + 1):
            self._excerpts[name, number + above] = _cut(lines[number - 1].rstrip())

    @property
    def excerpts(self) -> tuple[Excerpt, ...]:
        """The recorded source, one excerpt for each run of consecutive lines."""
        stretches: list[tuple[str, int, list[str]]] = []
        for (file, number), text in sorted(self._excerpts.items()):
            if not stretches or (stretches[-1][0], stretches[-1][1] + len(stretches[-1][2])) != (file, number):
                stretches.append((file, number, []))
            stretches[-1][2].append(text)
        return tuple(Excerpt(file, first, tuple(lines)) for file, first, lines in stretches)

    def _place(self, file: str, line: int, function: str) -> Place:
        function = "" if function.startswith("<") and "." not in function else function.replace("<locals>.", "")
        name, lines, above = self._source(file)
        units = tuple(
            Unit(first + above, last + above, _text(lines, first))
            for first, last in units_of(lines, line)
            if not any(at == file and first <= number <= last for at, number in self._step_lines)
        )
        return Place(name, line + above, function, _text(lines, line), units)

    def _source(self, file: str) -> tuple[str, list[str], int]:
        """The file's name for the user, its lines, and how many lines precede them in what the user sees."""
        if file == CELL_WITHOUT_IPYTHON:
            return CELL, self._code, 0
        lines = linecache.getlines(file)
        if not is_cell(file):
            return file, lines, 0
        if _alike(lines, self._code):
            return CELL, lines, self.above + _blank(self._code) - _blank(lines)
        number = ipython_cells().get(file)
        return "another cell" if number is None else f"cell [{number}]", lines, 0


def _text(lines: list[str], line: int) -> str:
    return _cut(lines[line - 1].strip() if 0 < line <= len(lines) else "")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _alike(compiled: list[str], code: list[str]) -> bool:
    """Whether IPython has compiled this code as those lines. It drops empty lines at the top and translates its syntax.

    The text identifies a cell even if it runs on a thread, from a panel or in a later call.
    """
    a = [line.strip() for line in compiled[_blank(compiled) :]]
    b = [line.strip() for line in code[_blank(code) :]]
    while b and not b[-1]:
        b.pop()
    while a and not a[-1]:
        a.pop()
    if not a or len(a) != len(b):
        return False
    differ = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    return all("get_ipython()" in x for x, _ in differ)


def _blank(lines: list[str]) -> int:
    """How many lines are empty before the first that is not."""
    return next((i for i, line in enumerate(lines) if line.strip()), 0)


def lines_above(code: str, source: str) -> int:
    """How many lines precede the code in the cell as the user sees it: its magic, and the lines above that."""
    if source != "cell":
        return 0
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    history = getattr(getattr(shell, "history_manager", None), "input_hist_raw", None) or [""]
    whole, below = history[-1].rstrip(), code.rstrip()
    if below and whole.endswith("\n" + below):
        return int(whole[: len(whole) - len(below)].count("\n"))
    return 1


def units_of(lines: Sequence[str], line: int) -> tuple[Lines, ...]:
    """The units around this line within its function, innermost first: its statement of several lines, and loops."""
    units: list[Lines] = []
    tree = _tree("\n".join(text.rstrip("\n") for text in lines)) if len(lines) <= _LONGEST_SOURCE else None
    for node in ast.walk(tree) if tree is not None else ():  # outermost first
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (last := node.end_lineno or 0):
            continue
        if isinstance(node, _SCOPES):
            units.clear()
        elif isinstance(node, _LOOPS) or (not isinstance(node, _COMPOUND) and last > node.lineno):
            units.append((node.lineno, last))
    return tuple(sorted(units, key=lambda unit: unit[1] - unit[0]))


@functools.lru_cache(maxsize=4)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
