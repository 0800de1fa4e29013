"""Memory that grows: by the same amount in each step, or with each run of the same cell."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpulab.memory.owners import Root, Walk
from gpulab.memory.storages import Key, Live, live
from gpulab.memory.survey import search
from gpulab.memory_record import Growth

LEAST_BYTES = 1_000_000  # ours: over all steps or per run; less is no one's problem
ALIKE = 1.5  # ours: the growth of one stretch over that of another, at most
RUNS = 3
_MOST_CELLS = 50
_GROWS = ("append", "extend", "add", "update", "insert", "setdefault", "appendleft", "put", "register_forward_hook")


def steady_growth(points: Sequence[tuple[int, int]]) -> float | None:
    """The growth per step through points (step, bytes) if it is about the same in all stretches; else None."""
    points = [*dict(points).items()]  # of one step the last
    rates = [(b - a) / (m - n) for (n, a), (m, b) in pairwise(points)]
    if len(rates) < RUNS - 1 or min(rates) <= 0 or max(rates) > ALIKE * min(rates):
        return None
    (first, before), (last, after) = points[0], points[-1]
    return (after - before) / (last - first) if after - before >= LEAST_BYTES else None


def growing_line(code: str, owner: str, above: int = 0) -> str:
    """The line of the code that adds to the owner, as "line 12: history.append(loss)"; empty if none surely does.

    `above`: how many lines precede the code in the cell as the user sees it.
    """
    path = (
        re.split(r"[\[({]", owner.removeprefix("module "), maxsplit=1)[0]
        .rpartition("'s variable ")[2]
        .rpartition(": ")[2]
    )
    names = re.findall(r"[A-Za-z_]\w*", path.partition(" ")[0])
    if not names:
        return ""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return ""
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, _ADDS) and _adds(node, names[-1])}
    if len(lines) != 1:
        return ""
    number = lines.pop()
    return f"line {number + above}: {code.splitlines()[number - 1].strip()}"


_ADDS = (ast.Call, ast.AugAssign, ast.Assign)


def _adds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _GROWS:
        return _ends(node.func.value, name)
    if isinstance(node, ast.AugAssign):
        return _ends(node.target, name)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) and _ends(target.value, name) for target in node.targets)
    return False


def _ends(node: ast.AST, name: str) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


# -- runs of the same cell ---------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """What was alive at the end of a run: in all, and by the name that holds it (empty: not searched)."""

    bytes: int
    names: dict[str, int]
    tensors: Mapping[Key, tuple[Callable[[], Any], ...]]


_cells: dict[str, list[_Run]] = {}


def forget_runs() -> None:
    """Forget what was alive after earlier runs."""
    _cells.clear()


def growth_of_runs(
    code: str, now: Live, stages: Callable[[], Iterable[list[Root]]], barriers: Iterable[object], above: int = 0
) -> Growth | None:
    """The owner that keeps more after each of the last three runs of a cell. `now`: what is alive at this run's end.

    Names are searched only if memory grew. Garbage that waits for its collection does not count. `above`: as in
    `growing_line`.
    """
    runs = _cells.setdefault(code, [])
    while len(_cells) > _MOST_CELLS:
        _cells.pop(next(iter(_cells)))
    if runs and sum(now.bytes.values()) - runs[-1].bytes >= LEAST_BYTES:
        gc.collect()
        now = live()
    total = sum(now.bytes.values())
    names: dict[str, int] = {}
    walk = None
    if runs and total - runs[-1].bytes >= LEAST_BYTES:
        walk = search(now.bytes, stages(), barriers=barriers)
        names = {name: sum(now.bytes[key] for key in keys) for name, keys in walk.by_root().items()}
    before = runs[-1] if runs else None
    tensors = {key: tuple(map(weakref.ref, of)) for key, of in now.tensors.items()}
    runs.append(_Run(total, names, tensors))
    del runs[:-RUNS]
    if before is None or walk is None or len(runs) < RUNS:
        return None
    each = [b.bytes - a.bytes for a, b in pairwise(runs)]
    if min(each) < LEAST_BYTES or max(each) > 2 * min(each) or not before.names:
        return None
    growth = _grown(now, walk, runs, names)
    return growth and replace(growth, line=growing_line(code, growth.owner, above))


def _grown(now: Live, walk: Walk, runs: list[_Run], names: dict[str, int]) -> Growth | None:
    grown = {name: count - runs[-2].names.get(name, 0) for name, count in names.items()}
    root = max(grown, key=lambda name: grown[name], default="")
    if not root or grown[root] < LEAST_BYTES:
        return None
    keys = walk.by_root()[root]
    fresh = [key for key in keys if all(reference() is None for reference in runs[0].tensors.get(key, ()))]
    return Growth(walk.name_of(root, fresh or keys, now.bytes), float(grown[root]), RUNS - 1)
