"""What a cell reads of its notebook, as source that a fresh process can run: nothing is pickled, nothing is forked.

Modules come along as imports, functions and classes as the text of the cell that defines them, plain values as
literals. Anything else (a tensor, a loader, a model) lives in the notebook's process alone and is refused by name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import linecache
import math
import pathlib
import symtable
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from gpulab.errors import UsageError
from gpulab.knobs.variables import Variables

MOST_CHARACTERS = 100_000  # of one literal: more is data, which belongs in a file
_OF_IPYTHON = frozenset({"get_ipython", "In", "Out", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh"})
_SAME_TEXT = (types.NoneType, bool, int, float, complex, str, bytes, range)  # as `repr` writes them


class NotebookSource(Struct, frozen=True):
    """`text` is the source of all that a cell reads of its notebook; `names` says what that is."""

    text: str
    names: tuple[str, ...]


def notebook_source(tree: ast.Module, namespace: Mapping[str, object], cells: Sequence[str] = ()) -> NotebookSource:
    """What the code in `tree` needs of the notebook's namespace. `cells`: the texts of the cells that ran, in order.

    Raises UsageError that names all that cannot come along, and the lines to write into the cell instead.
    """
    carrier = _Carrier(namespace, cells, _bound_in(tree))
    for name in sorted(Variables.of(tree, namespace).read & set(namespace)):
        carrier.need(name)
    if carrier.refused:
        raise UsageError(_refusal(carrier.refused, cells))
    return NotebookSource(carrier.text(), tuple(sorted(carrier.needed)))


class _Definition(Struct, frozen=True):
    name: str
    text: str
    place: tuple[int, int]  # of the cell, and of the line in it: the order in which the notebook ran them


def _bound_in(tree: ast.Module) -> frozenset[str]:
    """The names that the cell itself assigns: what a function reads of them is the cell's own."""
    return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


class _Carrier:
    """Follows names from what a cell reads to what that reads in turn."""

    def __init__(self, namespace: Mapping[str, object], cells: Sequence[str], bound: frozenset[str]) -> None:
        self._namespace = namespace
        self._cells = cells
        self._bound = bound
        self._imports: dict[str, str] = {}
        self._definitions: dict[str, _Definition] = {}
        self._values: dict[str, tuple[str, str]] = {}  # the text, and the class of the notebook that it needs
        self.needed: set[str] = set()
        self.refused: dict[str, object] = {}

    def text(self) -> str:
        """Imports first, then values and definitions as the notebook ran them, but each after what it needs at once."""
        parts, written = list(self._imports.values()), set[str]()

        def write(name: str) -> None:
            if name in written:
                return
            written.add(name)
            if name in self._values:
                text, kind = self._values[name]
                write(kind)
                parts.append(text)
            elif name in self._definitions:
                text = self._definitions[name].text
                for other in sorted(_globals_of(text, at_once=True) - {name}):
                    write(other)
                parts.append(text)

        for name in sorted(self._definitions, key=lambda name: self._definitions[name].place):
            write(name)
        for name in self._values:
            write(name)
        return "\n".join(dict.fromkeys(parts)) + "\n"

    def need(self, name: str) -> None:
        """Bring a name along, with all that it needs itself."""
        if name in self.needed or name not in self._namespace:
            return
        self.needed.add(name)
        value = self._namespace[name]
        kinds: list[str] = []
        if name in _OF_IPYTHON:
            self.refused[name] = value
        elif (line := _import_of(name, value)) is not None:
            self._imports[name] = "\n".join([line, *_submodules(name, value, self._cells)])
        elif isinstance(value, types.FunctionType | type):
            self._define(name, value)
        elif (text := _literal(value)) is not None:
            self._values[name] = f"{name} = {text}", ""
        elif (text := _constructed(value, lambda kind: self._class_named(kind, kinds))) is not None:
            self._values[name] = f"{name} = {text}", next(iter(kinds), "")
        else:
            self.refused[name] = value

    def _define(self, name: str, value: types.FunctionType | type) -> None:
        definition = _definition(value, self._cells)
        if definition is None or (
            isinstance(value, types.FunctionType) and value.__code__.co_freevars and not _is_wrapped(value)
        ):
            self.refused[name] = value
            return
        text = definition.text if definition.name == name else f"{definition.text}\n{name} = {definition.name}"
        self._definitions[name] = _Definition(name, text, definition.place)
        for other in sorted(_globals_of(definition.text) - {definition.name} - self._bound):
            self.need(other)

    def _class_named(self, kind: type, own: list[str]) -> str | None:
        """The name under which a class is there; None where it cannot be. `own`: those of the notebook."""
        if kind.__module__ == "__main__":
            if self._namespace.get(kind.__name__) is not kind:
                return None
            own.append(kind.__name__)
            self.need(kind.__name__)
            return kind.__name__ if kind.__name__ not in self.refused else None
        line = _import_of(kind.__name__, kind)
        if line is None:
            return None
        self._imports[f"class {kind.__name__}"] = line
        return kind.__name__


# -- imports -----------------------------------------------------------------------------------------------------------


def _import_of(name: str, value: object) -> str | None:
    """The line that imports it; None where no module has it."""
    if isinstance(value, types.ModuleType):
        if value.__name__ == "__main__":
            return None
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(path, str) and module != "__main__" and _at(module, path) is value:
        first, _, rest = path.partition(".")
        return f"from {module} import {first} as {name}" if not rest else f"import {module}\n{name} = {module}.{path}"
    own = getattr(value, "__name__", None)
    if callable(value) and isinstance(own, str):
        holder = next((m for m in _LIKELY if m in sys.modules and _at(m, own) is value), None)
        return None if holder is None else f"from {holder} import {own} as {name}"
    return None


_LIKELY = ("torch", "torch.nn.functional", "numpy", "math")  # their functions in C name no module


def _submodules(name: str, value: object, cells: Sequence[str]) -> list[str]:
    """The notebook's own `import a.b` of that package: a bare `import a` may not bring `a.b`."""
    if not isinstance(value, types.ModuleType) or value.__name__ != name:
        return []
    imports = (node for cell in cells for node in _statements(cell) if isinstance(node, ast.Import))
    dotted = (alias.name for node in imports for alias in node.names if alias.asname is None)
    return sorted({f"import {path}" for path in dotted if path.startswith(f"{name}.")})


def _at(module: str, path: str) -> object:
    value: object = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


# -- values ------------------------------------------------------------------------------------------------------------


def _literal(value: object) -> str | None:
    """A Python expression that needs no name; None where there is none, or it is too long."""
    try:
        text = _plain_text(value)
    except RecursionError:  # it holds itself
        return None
    return text if text is not None and len(text) <= MOST_CHARACTERS else None


def _plain_text(value: object) -> str | None:
    kind = type(value)
    if isinstance(value, float) and kind is float and not math.isfinite(value):
        return f'float("{value}")'
    if kind in _SAME_TEXT or (isinstance(value, slice) and _plain_text((value.start, value.stop, value.step))):
        return repr(value)
    if isinstance(value, dict) and kind is dict:
        pairs = [(_plain_text(key), _plain_text(item)) for key, item in value.items()]
        return None if any(None in pair for pair in pairs) else "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    if isinstance(value, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        items = [_plain_text(item) for item in value]
        inside = ", ".join(item for item in items if item is not None)
        written = f"[{inside}]" if kind is list else f"{kind.__name__}([{inside}])"
        return None if None in items else written
    return None


def _constructed(value: object, class_named: Callable[[type], str | None]) -> str | None:
    """An expression that makes it anew from plain values and its class; None where there is none."""
    if isinstance(value, enum.Enum):
        named = class_named(type(value))
        return f"{named}.{value.name}" if named else None
    if isinstance(value, pathlib.PurePath):
        return f'__import__("pathlib").Path({str(value)!r})'
    if isinstance(value, argparse.Namespace | types.SimpleNamespace) and type(value).__module__ != "__main__":
        module = "argparse" if isinstance(value, argparse.Namespace) else "types"
        fields = {name: _literal(item) for name, item in vars(value).items()}
        return _call(f'__import__("{module}").{type(value).__name__}', fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _literal(getattr(value, f.name, object())) for f in dataclasses.fields(value) if f.init}
        named = class_named(type(value))
        return _call(named, fields) if named else None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.device | torch.dtype):
        text = repr(value) if isinstance(value, torch.dtype) else f"torch.{value!r}"
        return f'__import__("torch").{text.removeprefix("torch.")}'
    return None


def _call(named: str, fields: Mapping[str, str | None]) -> str | None:
    if any(text is None or not name.isidentifier() for name, text in fields.items()):
        return None
    return f"{named}({', '.join(f'{name}={text}' for name, text in fields.items())})"


# -- definitions -------------------------------------------------------------------------------------------------------


def _definition(value: types.FunctionType | type, cells: Sequence[str]) -> _Definition | None:
    """The text that defines a function or a class of the notebook; None where it is not to be had."""
    if isinstance(value, types.FunctionType):
        inner = inspect.unwrap(value)
        return _of_function(inner if isinstance(inner, types.FunctionType) else value, cells)
    return next(_named_in(cells, value.__name__), None)


def _is_wrapped(function: types.FunctionType) -> bool:
    """Whether a decorator made it of a function that it names (`functools.wraps`)."""
    return inspect.unwrap(function) is not function


def _of_function(function: types.FunctionType, cells: Sequence[str]) -> _Definition | None:
    """By the line at which its code begins, in the cell that IPython keeps for tracebacks.

    None where the statement there defines something else: a function made within another one.
    """
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename))
    for node in _statements(text):
        if _begins(node) <= code.co_firstlineno <= (node.end_lineno or node.lineno):
            name = _defined_by(node)
            own = name if function.__name__ == "<lambda>" and isinstance(node, ast.Assign) else function.__name__
            if not name or name != own:
                return None
            lines = text.split("\n")[_begins(node) - 1 : node.end_lineno]
            place = next((i for i in range(len(cells) - 1, -1, -1) if cells[i].strip() == text.strip()), len(cells))
            return _Definition(name, "\n".join(lines), (place, node.lineno))
    return None


def _defined_by(node: ast.stmt) -> str:
    """The one name that a statement defines; empty for any other."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda) and len(node.targets) == 1:
        target = node.targets[0]
        return target.id if isinstance(target, ast.Name) else ""
    return ""


def _named_in(cells: Sequence[str], name: str) -> Iterator[_Definition]:
    """The class statements of that name, the newest first."""
    for place in range(len(cells) - 1, -1, -1):
        for node in reversed(_statements(cells[place])):
            if isinstance(node, ast.ClassDef) and node.name == name:
                lines = cells[place].split("\n")[_begins(node) - 1 : node.end_lineno]
                yield _Definition(name, "\n".join(lines), (place, node.lineno))


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


def _begins(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _globals_of(text: str, *, at_once: bool = False) -> set[str]:
    """All global names that a definition reads, when it is called or `at_once`: decorators, bases, defaults."""
    try:
        waiting = [symtable.symtable(text, "<definition>", "exec")]
    except SyntaxError:
        return set()
    names: set[str] = set()
    while waiting:
        table = waiting.pop()
        top = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())}
        waiting += [child for child in table.get_children() if not at_once or child.get_type() == "class"]
    return names


# -- what cannot come along --------------------------------------------------------------------------------------------


def _refusal(refused: Mapping[str, object], cells: Sequence[str]) -> str:
    """All names at once, with the lines of the notebook that made them."""
    if any(name in _OF_IPYTHON for name in refused):
        return "A rank is a plain Python process: remove magics, `!` commands, In and Out from the cell."
    named = [f"{name} (a {type(value).__name__})" for name, value in refused.items()]
    every = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    lines = [line for name in refused for line in _made_by(name, cells)]
    what = "it" if len(named) == 1 else "them"
    advice = f"Create {what} in the cell:" if lines else f"Create {what} in the cell, or in a function that it calls."
    shown = "".join(f"\n    {line}" for line in dict.fromkeys(lines))
    return f"The ranks are new processes and cannot access {every} of this notebook. {advice}{shown}"


def _made_by(name: str, cells: Iterable[str]) -> list[str]:
    """The last statement of the notebook that assigned it, where it has one line."""
    lines: list[str] = []
    for cell in cells:
        for node in _statements(cell):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
            if name in names and node.lineno == node.end_lineno:
                lines = [cell.split("\n")[node.lineno - 1].strip()]
    return lines
