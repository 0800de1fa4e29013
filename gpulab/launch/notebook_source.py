"""What a cell reads from its notebook, as source that a fresh process can run, without pickling or forking.

Modules become imports, functions and classes the text of their defining cell, plain values literals. Anything else (a
tensor, a loader, a model) exists only in the notebook's process and is refused by name.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import inspect
import math
import pathlib
import sys
import types
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from gpulab.errors import UsageError
from gpulab.knobs.variables import Variables
from gpulab.user_code import GlobalNames, global_names

MOST_CHARACTERS = 100_000  # of one value: larger values are data, which belong in a file
_OF_IPYTHON = frozenset({"get_ipython", "In", "Out", "_", "__", "___", "_i", "_ii", "_iii", "_ih", "_oh", "_dh"})
_SAME_TEXT = (types.NoneType, bool, int, float, complex, str, bytes, range)  # as `repr` writes them
_WITHOUT_MODULE = ("torch", "torch.nn.functional", "numpy", "math")  # their functions in C name no module
_IMPORTS = (-1, 0)  # their place: before the first cell


def notebook_source(tree: ast.Module, namespace: Mapping[str, object], cells: Sequence[str] = ()) -> str:
    """The source of everything that the code in `tree` needs from the notebook's namespace.

    `cells`: the texts of the cells that ran, in order. Raises UsageError naming everything that cannot be transferred,
    with the lines to write into the cell instead.
    """
    assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    carrier = _Carrier(namespace, cells, assigned)
    for name in sorted(Variables.of(tree, namespace).read):
        carrier.need(name)
    if carrier.refusals:
        raise UsageError(_refusal(carrier.refusals, cells))
    return carrier.text()


class _Part(Struct, frozen=True):
    """A piece of the source. `place`: the cell and its line, in the order in which the notebook ran them.

    `needs`: names that must be defined before it runs.
    """

    text: str
    place: tuple[int, int]
    needs: Iterable[str] = ()


class _Carrier:
    """Follows the names that a cell reads, and the names that their definitions read in turn.

    `own`: the names that the cell itself assigns; functions that read these names get the cell's values.
    """

    def __init__(self, namespace: Mapping[str, object], cells: Sequence[str], own: set[str]) -> None:
        self._namespace = namespace
        self._cells = cells
        self._own = own
        self._parts: dict[str, _Part] = {}
        self._needed: set[str] = set()
        self.refusals: dict[str, object] = {}

    def text(self) -> str:
        """All parts in the notebook's order, but each after the parts that it needs."""
        lines: dict[str, None] = {}
        waiting = dict(sorted(self._parts.items(), key=lambda item: item[1].place))

        def write(name: str) -> None:
            part = waiting.pop(name, None)
            if part is not None:
                for other in sorted(part.needs):
                    write(other)
                lines[part.text] = None

        for name in list(waiting):
            write(name)
        return "\n".join(lines) + "\n"

    def need(self, name: str) -> None:
        """Include a name, with everything that it needs."""
        if name in self._needed or name not in self._namespace:
            return
        self._needed.add(name)
        value = self._namespace[name]
        if name in _OF_IPYTHON:
            part = None
        elif (line := _import_of(name, value)) is not None:
            part = _Part("\n".join([line, *_submodules(name, value, self._cells)]), _IMPORTS)
        elif isinstance(value, types.FunctionType | type):
            part = self._definition(name, value)
        else:
            part = self._value(name, value)
        if part is None:
            self.refusals[name] = value
        else:
            self._parts[name] = part

    def _definition(self, name: str, value: types.FunctionType | type) -> _Part | None:
        definition = _definition_of(value, self._cells)
        closes_over = isinstance(value, types.FunctionType) and value.__code__.co_freevars
        if definition is None or (closes_over and inspect.unwrap(value) is value):
            return None
        own_name, part = definition
        names = _names_of(part.text)
        for other in sorted((names.reads | names.calls_read) - {own_name} - self._own):
            self.need(other)
        text = part.text if own_name == name else f"{part.text}\n{name} = {own_name}"
        return _Part(text, part.place, names.reads - {own_name})

    def _value(self, name: str, value: object) -> _Part | None:
        classes: set[type] = set()
        try:
            text = _expression(value, classes)
        except (ValueError, AttributeError, RecursionError):  # an unset field; a list that contains itself
            return None
        has_classes = all(map(self._has_class, classes))
        if len(text) > MOST_CHARACTERS or not has_classes:
            return None
        return _Part(f"{name} = {text}", (len(self._cells), 0), {kind.__name__ for kind in classes})

    def _has_class(self, kind: type) -> bool:
        """Include a class under its own name. Returns whether that is possible."""
        name = kind.__name__
        if kind.__module__ == "__main__":
            self.need(name)
            return self._namespace.get(name) is kind and name not in self.refusals
        line = _import_of(name, kind)
        if line is not None:
            self._parts[f"class {name}"] = _Part(line, _IMPORTS)
        return line is not None


# -- imports -----------------------------------------------------------------------------------------------------------


def _import_of(name: str, value: object) -> str | None:
    """The line that imports the value; None if no module has it."""
    if isinstance(value, types.ModuleType):
        if value.__name__ == "__main__":
            return None
        return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(path, str) and module != "__main__" and _at(module, path) is value:
        first, _, rest = path.partition(".")
        return f"from {module} import {first} as {name}" if not rest else f"import {module}\n{name} = {module}.{path}"
    own_name = getattr(value, "__name__", None)
    if callable(value) and isinstance(own_name, str):
        owner = next((m for m in _WITHOUT_MODULE if m in sys.modules and _at(m, own_name) is value), None)
        return None if owner is None else f"from {owner} import {own_name} as {name}"
    return None


def _submodules(name: str, value: object, cells: Sequence[str]) -> list[str]:
    """The notebook's `import a.b` lines for a package: `import a` alone may not import `a.b`."""
    if not isinstance(value, types.ModuleType) or value.__name__ != name:
        return []
    imports = (node for cell in cells for node in _statements(cell) if isinstance(node, ast.Import))
    paths = (alias.name for node in imports for alias in node.names if alias.asname is None)
    return sorted({f"import {path}" for path in paths if path.startswith(f"{name}.")})


def _at(module: str, path: str) -> object:
    value: object = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


# -- values ------------------------------------------------------------------------------------------------------------


def _expression(value: object, classes: set[type]) -> str:
    """A Python expression that recreates the value; adds the classes that it names to `classes`.

    Raises ValueError if there is none.
    """

    def each(values: Iterable[object]) -> list[str]:
        return [_expression(one, classes) for one in values]

    def call(function: str, fields: Mapping[str, object]) -> str:
        if not all(field.isidentifier() for field in fields):
            raise ValueError
        arguments = zip(fields, each(fields.values()), strict=True)
        return f"{function}({', '.join(f'{field}={text}' for field, text in arguments)})"

    kind = type(value)
    if isinstance(value, float) and kind is float and not math.isfinite(value):
        return f'float("{value}")'
    if kind in _SAME_TEXT:
        return repr(value)
    if isinstance(value, slice):
        return f"slice(*{_expression((value.start, value.stop, value.step), classes)})"
    if isinstance(value, dict) and kind is dict:
        pairs = zip(each(value), each(value.values()), strict=True)
        return "{" + ", ".join(f"{key}: {text}" for key, text in pairs) + "}"
    if isinstance(value, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        return f"{kind.__name__}([{', '.join(each(value))}])"
    if isinstance(value, enum.Enum):
        classes.add(kind)
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, pathlib.PurePath):
        return f'__import__("pathlib").Path({str(value)!r})'
    if kind in (argparse.Namespace, types.SimpleNamespace):
        return call(f'__import__("{kind.__module__}").{kind.__name__}', vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        classes.add(kind)
        return call(kind.__name__, {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init})
    if kind.__module__ == "torch" and kind.__name__ in ("device", "dtype"):
        return f'__import__("torch").{repr(value).removeprefix("torch.")}'
    raise ValueError


# -- definitions -------------------------------------------------------------------------------------------------------


def _definition_of(value: types.FunctionType | type, cells: Sequence[str]) -> tuple[str, _Part] | None:
    """The name and the text of the statement that defines a function or a class; None if it is not available.

    A function's text is the one that IPython keeps for tracebacks; for a class, the newest definition of its name.
    """
    own_name = value.__name__
    texts = [(place, cell) for place, cell in enumerate(cells) if own_name in cell][::-1]
    if isinstance(value, types.FunctionType):
        try:
            text = inspect.getsource(value)
        except OSError:
            return None
        own_name = inspect.unwrap(value).__name__
        texts = [(max((place for place, cell in enumerate(cells) if text in cell), default=len(cells)), text)]
    for place, text in texts:
        names = {name: node for node in _statements(text) if (name := _defined_by(node, own_name))}
        if len(names) == 1:
            ((name, node),) = names.items()
            first = min(one.lineno for one in (node, *getattr(node, "decorator_list", ())))
            lines = text.split("\n")[first - 1 : node.end_lineno]
            line = value.__code__.co_firstlineno if isinstance(value, types.FunctionType) else first
            return name, _Part("\n".join(lines), (place, line))
    return None


def _defined_by(node: ast.stmt, own_name: str) -> str:
    """The variable to which a statement binds the function or class `own_name`; empty if it defines another."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name if node.name == own_name else ""
    if own_name == "<lambda>" and isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        return node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else ""
    return ""


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):
        return []


def _names_of(definition: str) -> GlobalNames:
    """The global names that a definition reads: at once (decorators, bases, defaults), and when called."""
    return global_names(compile(definition, "<definition>", "exec", dont_inherit=True))


# -- refusals --------------------------------------------------------------------------------------------


def _refusal(refusals: Mapping[str, object], cells: Sequence[str]) -> str:
    """A message with all refused names, and the notebook lines that assigned them."""
    if any(name in _OF_IPYTHON for name in refusals):
        return "A rank is a plain Python process: remove magics, `!` commands, In and Out from the cell."
    words = [f"{name} (a {type(value).__name__})" for name, value in refusals.items()]
    every = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    lines = [line for name in refusals if (line := _assignment_of(name, cells))]
    what = "it" if len(words) == 1 else "them"
    advice = f"Create {what} in the cell:" if lines else f"Create {what} in the cell, or in a function that it calls."
    listing = "".join(f"\n    {line}" for line in dict.fromkeys(lines))
    return f"The ranks are new processes and cannot access {every} of this notebook. {advice}{listing}"


def _assignment_of(name: str, cells: Iterable[str]) -> str:
    """The notebook's last statement that assigned the name, if it is a single line."""
    line = ""
    for cell in cells:
        for node in _statements(cell):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)}
            if name in names and node.lineno == node.end_lineno:
                line = cell.split("\n")[node.lineno - 1].strip()
    return line
