"""Variables of the user's own code as knobs: which names can be set for one run, to what, and how that is undone.

Two kinds can be set: a name that the code assigns as a plain literal at its top level before anything reads it (the
literal is replaced), and a name that the code reads and an earlier cell assigned (it is set in the namespace). It also
counts as read where a function or class that the code uses reads it, whichever cell defines that. A plain literal is a
number, a string, a bool, None, or a tuple or list of these.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from itertools import islice
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

from msgspec import Struct

from gpulab.errors import UsageError
from gpulab.knobs.knob import CodeEdit
from gpulab.user_code import global_names

Plain = bool | int | float | str | None | tuple["Plain", ...] | list["Plain"]

_ABSENT = object()
_BUILDING = frozenset({"__new__", "__init__", "__post_init__"})  # of an existing object these have run


class Variables(Struct, frozen=True):
    """The names that code could have set. `literals`: its own, with their values; `read`: those it takes from outside.

    `namespace` is the live one, where the code is going to run. `used`: all that it may read, wherever it is from.
    """

    literals: Mapping[str, Plain]
    read: frozenset[str]
    namespace: Mapping[str, object]
    used: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tree: ast.Module, namespace: Mapping[str, object]) -> Variables:
        reading = _Reading(namespace)
        reading.follow(tree)
        values = {name: _literal(nodes[-1]) for name, nodes in reading.literals.items()}
        literals = {n: v for n, v in values.items() if is_plain(v)}
        return cls(literals, frozenset(reading.free), namespace, frozenset(reading.read))

    @classmethod
    def of_function(cls, function: FunctionType) -> Variables:
        """The globals that a function reads, itself or through what it uses."""
        namespace = _unwrapped(function).__globals__
        reading = _Reading(namespace)
        reading.use(function)
        return cls({}, frozenset(reading.free), namespace, frozenset(reading.read))

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be set, in alphabetical order."""
        outside = {n for n in self.read if n in self.namespace and is_plain(self.namespace[n])}
        return tuple(sorted(outside | set(self.literals)))

    def has(self, name: str) -> bool:
        """Whether the code has a variable of that name. Raises UsageError where there is one that cannot be set."""
        if name in self.literals:
            return True
        if name not in self.namespace:
            return False
        present = self.namespace[name]
        if name not in self.read:
            if is_plain(present):
                raise UsageError(
                    f"{name} is {present!r} in the notebook, but this code does not appear to read it: "
                    "change it where it is used."
                )
            return False
        if not is_plain(present):
            raise UsageError(
                f"{name} has type {type(present).__name__}: only a number, a string, True, False, None, or a "
                "tuple or list of these can be set for a run."
            )
        return True

    def present(self, name: str) -> Plain:
        """Its value as it is. Raises UsageError where there is none."""
        if not self.has(name):
            raise UsageError(
                f"{name} cannot be set: the code neither reads it nor assigns it a literal. "
                f"Assign it at the top level, e.g. {name} = 1."
            )
        if name in self.literals:
            return self.literals[name]
        value = self.namespace[name]
        assert is_plain(value)
        return value

    def value(self, name: str, raw: Plain) -> Plain:
        """`raw`, a value or a text, as a value of that variable. Raises UsageError where it does not fit."""
        return fitted(name, raw, self.present(name))


def names_in(tree: ast.AST) -> frozenset[str]:
    """All names that the code reads, assigns, defines, imports or deletes, in whatever scope."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Global):
            names.update(node.names)
    return frozenset(names)


def replace_literals(tree: ast.Module, values: Mapping[str, object]) -> ast.Module:
    """The code with those of its own literals replaced that have a value here; new nodes stand where the old stood.

    Other names are passed over.
    """
    tree = copy.deepcopy(tree)
    places = [(node, name) for name, nodes in literal_places(tree).items() if name in values for node in nodes]
    replace_nodes(tree, {node: literal_node(values[name]) for node, name in places})
    return tree


@contextmanager
def setting_names(namespace: MutableMapping[str, Any], values: Mapping[str, object]) -> Iterator[None]:
    """Set names for the code inside, then put back what they were, or their absence, whatever the code made of them."""
    before = {name: namespace.get(name, _ABSENT) for name in values}
    try:
        namespace.update(values)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                namespace.pop(name, None)
            else:
                namespace[name] = value


def code_edit(name: str, value: Plain) -> CodeEdit:
    """The edit that keeps it: `call` is empty and `keyword` the name, where a literal of the cell is to be changed."""
    literal = repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        literal = f'float("{literal}")'
    return CodeEdit(f"{name} = {literal}", keyword=name, literal=literal)


# -- values ------------------------------------------------------------------------------------------------------------


def is_plain(value: object) -> TypeGuard[Plain]:
    """Whether it is a plain literal. A subclass (NumPy's float64 is one of float) is not."""
    if type(value) in (tuple, list):
        assert isinstance(value, tuple | list)
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def plain_value(text: str) -> Plain:
    """What a text means: a Python literal, else itself."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if is_plain(value) else text


def fitted(name: str, raw: Plain, present: Plain) -> Plain:
    """`raw`, a value or a text, in the type of the present value. Raises UsageError where that loses something."""
    value = plain_value(raw) if isinstance(raw, str) else raw
    if present is None:
        return value
    if isinstance(present, str):
        if isinstance(raw, str):
            return value if isinstance(value, str) else raw
    elif type(value) is type(present):
        return value
    elif isinstance(present, tuple | list):
        if isinstance(value, tuple | list):
            return tuple(value) if isinstance(present, tuple) else list(value)
    elif isinstance(present, bool):
        word = value.lower() if isinstance(value, str) else ""
        if word in ("true", "false"):
            return word == "true"
    elif isinstance(present, float):
        if type(value) is int and int(float(value)) == value:
            return float(value)
    elif isinstance(value, float) and value.is_integer():
        return int(value)
    raise UsageError(_unfit(name, raw, present))


def _unfit(name: str, raw: Plain, present: Plain) -> str:
    kind = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}.get(
        type(present), f"a {type(present).__name__}"
    )
    value = plain_value(raw) if isinstance(raw, str) else raw
    fraction = type(present) is int and isinstance(value, float)
    cure = f" Write {present}.0 in the code to try fractions." if fraction else ""
    return f"{name} must be {kind} (it is {present!r} in the code), got {raw!r}.{cure}"


# -- literals in the code ----------------------------------------------------------------------------------------------


def literal_places(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """For each name that the code itself assigns plain literals before it reads it: their nodes."""
    reading = _Reading({})
    reading.follow(tree)
    return reading.literals


def _literal(node: ast.expr) -> object:
    """Its value; `_ABSENT` where it is no literal."""
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _ABSENT
    return value


def literal_node(value: object) -> ast.expr:
    """The node of a plain literal, as the parser makes it."""
    if isinstance(value, tuple | list):
        kind = ast.Tuple if isinstance(value, tuple) else ast.List
        return kind([literal_node(v) for v in value], ast.Load())
    if isinstance(value, int | float) and repr(value).startswith("-"):
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    assert isinstance(value, bool | int | float | str | None)
    return ast.Constant(value)


def _assigned_literals(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """The names that a statement assigns plain literals. In `a = b = 1` neither can be set without the other."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    match statement:
        case ast.Assign(targets=[ast.Tuple() | ast.List() as names], value=ast.Tuple() | ast.List() as values):
            starred = any(isinstance(e, ast.Starred) for e in (*names.elts, *values.elts))
            if len(names.elts) == len(values.elts) and not starred:
                pairs = list(zip(names.elts, values.elts, strict=True))
        case ast.Assign(targets=[whole], value=value):
            pairs = [(whole, value)]
        case ast.AnnAssign(target=whole, value=ast.expr() as value):
            pairs = [(whole, value)]
    for target, value in pairs:
        if isinstance(target, ast.Name) and is_plain(_literal(value)):
            yield target.id, value


class _Replacing(ast.NodeTransformer):
    """Puts other nodes in the place of some."""

    def __init__(self, new: Mapping[ast.expr, ast.expr]) -> None:
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        new = self._new.get(node) if isinstance(node, ast.expr) else None
        if new is None:
            return self.generic_visit(node)
        for part in ast.walk(new):
            ast.copy_location(part, node)
        return new


def replace_nodes(tree: ast.Module, new: Mapping[ast.expr, ast.expr]) -> None:
    """Put others in the place of some nodes, as if they stood there in the text."""
    _Replacing(new).visit(tree)


# -- which names are read, and when ------------------------------------------------------------------------------------


class _Reading:
    """Follows code statement by statement. Its byte code tells which names each statement reads and binds."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self._namespace = namespace
        self._bound: set[str] = set()
        self.read: set[str] = set()
        self._later: dict[str, set[str]] = {}  # what is read when a function or class of the code is used
        self.free: set[str] = set()
        self.literals: dict[str, list[ast.expr]] = {}

    def follow(self, tree: ast.Module) -> None:
        """All statements in turn. What functions read counts at the end, also where the code never calls them."""
        for statement in tree.body:
            self._statement(statement)
        self._reads(name for names in self._later.values() for name in names)

    def use(self, value: object) -> None:
        """The code calls something that is defined in the namespace."""
        self._reads(_reads_of(value, self._namespace))

    def _statement(self, statement: ast.stmt) -> None:
        try:
            code = compile(
                ast.Module([statement], []), "", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
        except (SyntaxError, ValueError):  # it will not run
            return
        names = global_names(code)
        self._reads(names.reads if names.binds else names.reads | names.calls_read)
        for name, node in _assigned_literals(statement):
            if name not in self.read:
                self.literals.setdefault(name, []).append(node)
        self._bound |= names.binds
        self._later.update(dict.fromkeys(names.binds, names.calls_read))

    def _reads(self, names: Iterable[str]) -> None:
        waiting, closure = list(names), set[str]()
        while waiting:
            name = waiting.pop()
            if name in closure:
                continue
            closure.add(name)
            if name not in self._bound:
                self.free.add(name)
                waiting += _reads_of(self._namespace.get(name), self._namespace)
            waiting += self._later.get(name, ())
        self.read |= closure


def _reads_of(value: object, namespace: Mapping[str, object]) -> set[str]:
    """Global names that something defined in the namespace reads: a function, a class, an object of such a class."""
    names: set[str] = set()
    for function in _functions(value):
        if function.__globals__ is namespace:
            own = global_names(function.__code__)
            names |= own.reads | own.calls_read
    return names


def _functions(value: object) -> Iterator[FunctionType]:
    """A function; the methods of a class; those that an object, and what it holds, can still run, once per class."""
    kinds: set[type] = set()
    for thing in walk(value):
        if isinstance(thing, FunctionType):
            yield _unwrapped(thing)
        elif isinstance(thing, type):
            yield from (f for _, f in _methods(thing))
        elif type(thing) not in kinds:
            kinds.add(type(thing))
            yield from (f for name, f in _methods(type(thing)) if name not in _BUILDING)


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    for name, member in (m for base in kind.__mro__ for m in vars(base).items()):
        member = getattr(member, "__func__", member)
        member = member.fget if isinstance(member, property) else member
        if isinstance(member, FunctionType):
            yield name, _unwrapped(member)


def _unwrapped(function: FunctionType) -> FunctionType:
    inner = inspect.unwrap(function)
    return inner if isinstance(inner, FunctionType) else function


MOST_OBJECTS = 500
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # but no class of the user's among them


def walk(*things: object, follow: Callable[[object], Iterable[object]] | None = None) -> Iterator[object]:
    """The objects themselves and all that they hold, breadth first; `follow` says what one object holds."""
    waiting, objects = deque(things), dict[int, object]()
    while waiting and len(objects) < MOST_OBJECTS:
        thing = waiting.popleft()
        if type(thing) in _PLAIN or isinstance(thing, ModuleType | BuiltinFunctionType) or id(thing) in objects:
            continue
        objects[id(thing)] = thing  # referred to, so that its id is not used again
        yield thing
        with suppress(Exception):  # a user's object may raise anything, or change meanwhile
            waiting += (follow or contents)(thing)


def contents(thing: object) -> list[object]:
    """The objects that one holds: in its attributes, in its closure or as its elements."""
    if isinstance(thing, type):
        return []
    if isinstance(thing, FunctionType):
        return [c.cell_contents for c in thing.__closure__ or () if _is_filled(c)]
    if isinstance(thing, MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, list | tuple):
        return list(thing[:MOST_OBJECTS])
    fields = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    return list(islice(fields.values(), MOST_OBJECTS))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable is not assigned yet
        return False
