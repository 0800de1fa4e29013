"""Variables of the user's own code as knobs: which names can be set for one run, to what, and how that is undone.

Two kinds can be set: a name that the code assigns as a plain literal at its top level before anything reads it (the
literal is replaced), and a name that an earlier cell assigned and the code reads (it is set in the namespace). Reads by
functions and classes that the code uses count too, whichever cell defines them. A plain literal is a number, a string,
a bool, None, or a tuple or list of these.
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
_BUILDING = frozenset({"__new__", "__init__", "__post_init__"})  # for an existing object they have already run


class Variables(Struct, frozen=True):
    """The settable names of some code. `literals`: assigned by the code, with their values; `read`: from outside.

    `namespace`: the live namespace in which the code will run. `used`: all names that the code may read.
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
        """All settable names, in alphabetical order."""
        outside = {n for n in self.read if n in self.namespace and is_plain(self.namespace[n])}
        return tuple(sorted(outside | set(self.literals)))

    def has(self, name: str) -> bool:
        """Whether the code has a variable of that name. Raises UsageError if it exists but cannot be set."""
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
        """The present value of a variable. Raises UsageError if there is none."""
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
        """`raw`, a value or a text, as a value of that variable. Raises UsageError if it does not fit."""
        return fitted(name, raw, self.present(name))


def names_in(tree: ast.AST) -> frozenset[str]:
    """All names that the code reads, assigns, defines, imports or deletes, in any scope."""
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
    """The code with new values for its own literals; new nodes have the positions of the old ones.

    Names without such a literal are ignored.
    """
    tree = copy.deepcopy(tree)
    places = [(node, name) for name, nodes in literal_places(tree).items() if name in values for node in nodes]
    replace_nodes(tree, {node: literal_node(values[name]) for node, name in places})
    return tree


@contextmanager
def setting_names(namespace: MutableMapping[str, Any], values: Mapping[str, object]) -> Iterator[None]:
    """Set names for the code inside, then restore their former values or absence, whatever the code assigned."""
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
    """The edit that makes it permanent. To change a literal of the cell, `call` is empty and `keyword` the name."""
    literal = repr(value)
    if isinstance(value, float) and not math.isfinite(value):
        literal = f'float("{literal}")'
    return CodeEdit(f"{name} = {literal}", keyword=name, literal=literal)


# -- values ------------------------------------------------------------------------------------------------------------


def is_plain(value: object) -> TypeGuard[Plain]:
    """Whether it is a plain literal. Instances of subclasses (NumPy's float64 subclasses float) are not."""
    if type(value) in (tuple, list):
        assert isinstance(value, tuple | list)
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def plain_value(text: str) -> Plain:
    """The value of a text: a Python literal, else the text itself."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value if is_plain(value) else text


def fitted(name: str, raw: Plain, present: Plain) -> Plain:
    """`raw`, a value or a text, in the type of the present value. Raises UsageError if that loses information."""
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
    """The node's value; `_ABSENT` if it is no literal."""
    try:
        value: object = ast.literal_eval(node)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _ABSENT
    return value


def literal_node(value: object) -> ast.expr:
    """The node of a plain literal, as the parser would make it."""
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
    """Replaces nodes by others."""

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
    """Replace nodes by others, as if these were in the text."""
    _Replacing(new).visit(tree)


# -- which names are read, and when ------------------------------------------------------------------------------------


class _Reading:
    """Follows code statement by statement. The byte code shows which names each statement reads and binds."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self._namespace = namespace
        self._bound: set[str] = set()
        self.read: set[str] = set()
        self._later: dict[str, set[str]] = {}  # what is read when a function or class of the code is used
        self.free: set[str] = set()
        self.literals: dict[str, list[ast.expr]] = {}

    def follow(self, tree: ast.Module) -> None:
        """Follow all statements in turn. Reads by functions count at the end, even if the code never calls them."""
        for statement in tree.body:
            self._statement(statement)
        self._reads(name for names in self._later.values() for name in names)

    def use(self, value: object) -> None:
        """The code calls an object that is defined in the namespace."""
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
    """Global names read by an object defined in the namespace: a function, a class, an instance of such a class."""
    names: set[str] = set()
    for function in _functions(value):
        if function.__globals__ is namespace:
            own = global_names(function.__code__)
            names |= own.reads | own.calls_read
    return names


def _functions(value: object) -> Iterator[FunctionType]:
    """A function itself; the methods of a class; the methods that an instance and its contents can still run."""
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
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})  # exact types only, no user's subclass


def walk(*things: object, follow: Callable[[object], Iterable[object]] | None = None) -> Iterator[object]:
    """These objects and everything that they hold, breadth first; `follow` lists what one object holds."""
    waiting, objects = deque(things), dict[int, object]()
    while waiting and len(objects) < MOST_OBJECTS:
        thing = waiting.popleft()
        if type(thing) in _PLAIN or isinstance(thing, ModuleType | BuiltinFunctionType) or id(thing) in objects:
            continue
        objects[id(thing)] = thing  # kept alive, so that its id is not reused
        yield thing
        with suppress(Exception):  # a user's object may raise anything, or change meanwhile
            waiting += (follow or contents)(thing)


def contents(thing: object) -> list[object]:
    """The objects that `thing` holds: in its attributes, in its closure or as its elements."""
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
