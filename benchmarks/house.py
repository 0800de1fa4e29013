"""`python -m benchmarks.house [FOLDER]`: how large the package is, room by room, and which modules import in a circle.

Syntax nodes are counted without docstrings, so that neither formatting nor documentation changes the figure.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import Figure

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ("lessons", "demo", "board")  # the rooms beside the package's core


class Size(NamedTuple):
    """What one module or one room amounts to."""

    files: int = 0
    lines: int = 0
    nodes: int = 0

    def plus(self, other: Size) -> Size:
        """Both together."""
        return Size(*(one + two for one, two in zip(self, other, strict=True)))


def syntax_nodes(tree: ast.AST) -> int:
    """The number of nodes of a syntax tree, without its docstrings."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(tree))
    docstrings = sum(isinstance(node, holders) and ast.get_docstring(node, clean=False) is not None for node in nodes)
    return len(nodes) - 2 * docstrings  # an expression and its constant


def sizes(folder: Path) -> dict[Path, Size]:
    """The size of every module below a folder, by its path from there."""
    texts = {path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return {path: Size(1, text.count("\n"), syntax_nodes(ast.parse(text))) for path, text in texts.items()}


def rooms(modules: dict[Path, Size]) -> dict[str, Size]:
    """The size of every room: what stands in one folder of the package, its subfolders included."""
    by_room: defaultdict[str, Size] = defaultdict(Size)
    for path, size in modules.items():
        room = path.parts[0] if len(path.parts) > 1 else "(top level)"
        by_room[room] = by_room[room].plus(size)
    return dict(by_room)


def imports(folder: Path) -> dict[str, set[str]]:
    """Which modules of the package each module imports, at its top or later; those only for types are not counted."""
    names = {_module_name(folder, path): path for path in folder.rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        targets: set[str] = set()
        for node in _run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= (inner & names.keys()) or {node.module}
        edges[name] = (targets & names.keys()) - {name}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The modules that import one another, directly or through others."""
    reach = {name: _reachable(name, edges) for name in edges}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in edges}
    return sorted((set(group) for group in groups if group), key=sorted)


def _module_name(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            yield from _run_time_nodes(node)


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    reachable: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in reachable:
            reachable.add(name)
            waiting.extend(edges[name])
    return reachable


def measure(folder: Path = ROOT / "gpulab") -> dict[str, Any]:
    """Files, lines and nodes of each room and in total, the median file, and the circles."""
    modules = sizes(folder)
    by_room = rooms(modules)
    package = [room for room in by_room if room not in LESSONS]
    totals = {"package": package, "lessons, demo, board": [room for room in by_room if room in LESSONS]}
    return {
        "rooms": {room: size._asdict() for room, size in sorted(by_room.items())},
        "totals": {
            label: reduce(Size.plus, (by_room[room] for room in members), Size())._asdict()
            for label, members in totals.items()
        },
        "median_file_lines": median(size.lines for path, size in modules.items() if path.parts[0] not in LESSONS),
        "circles": [sorted(group) for group in circles(imports(folder))],
    }


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Totals of the package without lessons, and the lines of the lessons."""
    package, lessons = results["totals"].values()
    for what in ("files", "lines", "nodes"):
        yield Figure(f"the package without lessons: {what}", package[what], target=what, words=f"{package[what]:,}")
    yield Figure("lessons, demo and board: lines", lessons["lines"], target="lessons", words=f"{lessons['lines']:,}")
    yield Figure("lines of the median file", results["median_file_lines"], target="median")
    yield Figure("circles of imports", len(results["circles"]), target="circles")


def main() -> None:
    """Print the table of rooms, the totals, the median file and the circles."""
    results = measure(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "gpulab")
    print(f"{'room':<22}{'files':>6}{'lines':>8}{'nodes':>9}")
    for room, size in (results["rooms"] | results["totals"]).items():
        print(f"{room:<22}{size['files']:>6}{size['lines']:>8,}{size['nodes']:>9,}")
    print(f"median file of the package: {results['median_file_lines']:.0f} lines")
    for group in results["circles"]:
        print("circle:", ", ".join(group))


if __name__ == "__main__":
    main()
