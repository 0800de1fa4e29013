"""Finds the user's lines that make a training step: those that update and, without a DataLoader, make a batch.

The lines of a batch are found by slicing backwards. From the statement with the backward pass, names are followed to
the statements that assign them. Statements whose values need gradients, or that use a network or its results, are the
model's work; the rest makes the data. A name that cannot be followed yields nothing. Frames are read once, and only
names and numbers are stored.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from msgspec import Struct

from gpulab.capture.places import users_frames, users_stack
from gpulab.capture.stack_reader import Spot, Stack
from gpulab.user_code import CELL_WITHOUT_IPYTHON, Owner, owners

_TRIES = 8  # backward passes to follow: the first one may belong to another loop
_UPDATES = 32  # updates to examine: by then a loop has used all its optimizers
_CALLERS = 8  # functions to follow outwards
_INSIDE = 32  # values of a container that are examined
_DEEP = 3  # levels of user functions that a function calls
_UNREADABLE = frozenset({"locals", "vars", "exec", "eval"})  # reading the frame of such code could change what it holds

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)


class LoopLines:
    """Learns the lines from the first backward passes and updates of a run; `code` is that of a cell without a file.

    In a loop without a DataLoader only the last update shows where an iteration begins: the code after it, and the code
    that prepares the next batch, both lie between two updates.
    """

    def __init__(self, code: str = "") -> None:
        self._code = code
        self._tries = 0  # backward passes
        self._batch: frozenset[Spot] = frozenset()
        self.needed: set[Spot] = set()  # lines from which the loss is computed; empty: unknown
        self._updates = 0
        self.update: Stack = ()  # from the loop to its last update, outermost first; empty without an optimizer
        self.step_lines: set[Spot] = set()  # lines of the loop over steps: its updates and requests to loaders

    def backward(self, frame: FrameType | None) -> None:
        """A backward pass is called from `frame`. An error in gpulab, or unreadable code, yields nothing."""
        if self._batch or self._tries >= _TRIES:
            return
        self._tries += 1
        try:
            self._batch = frozenset(_batch_lines(frame, self._code, self.needed))
        except Exception:
            self._tries = _TRIES
            self.needed.clear()

    def updated(self, frame: FrameType | None) -> None:
        """An optimizer has stepped, called from `frame`; of several in one function the last counts."""
        if self._updates >= _UPDATES:
            return
        self._updates += 1
        stack = users_stack(frame)[::-1]
        self.step_lines.update(stack)
        if not self.update or _later(stack, self.update):
            self.update = stack

    def add_request(self, frame: FrameType | None) -> None:
        """A new iterator was requested from a loader, called from `frame`."""
        if len(self.step_lines) < _UPDATES:
            self.step_lines.update(users_stack(frame))

    @property
    def make_batches(self) -> bool:
        """Whether the lines that make a batch are known."""
        return bool(self._batch)

    def is_aside(self, spot: Spot) -> bool:
        """Whether this line is in a function that was followed, but the loss is not computed from it."""
        return spot not in self.needed and any(spot[::2] == line[::2] for line in self.needed)

    def makes_batch(self, stack: Stack) -> bool:
        """Whether this stack makes the next batch."""
        return bool(self._batch) and not self._batch.isdisjoint(stack)


def _later(stack: Stack, reference: Stack) -> bool:
    """Whether both stacks first differ, from the outermost line, in one function, and `stack` is later there."""
    for (file, line, function), (its_file, its_line, its_function) in zip(stack, reference, strict=False):
        if (file, function) != (its_file, its_function) or line < its_line:
            return False
        if line > its_line:
            return True
    return False


def _batch_lines(frame: FrameType | None, code: str, needed: set[Spot]) -> Iterator[Spot]:
    """The lines that make a batch, from the innermost function outwards, as long as the followed names are arguments.

    `needed` gets the lines of the model's work, too.
    """
    needs: set[str] = set()
    for depth, user in enumerate(users_frames(frame)):
        tree = _tree(user.f_code.co_filename, code)
        scope = _scope(tree, user.f_code)
        if scope is None or depth == _CALLERS or not _UNREADABLE.isdisjoint(user.f_code.co_names):
            return
        statements = tuple(_statements(scope))
        current = [s for s in statements if s.first <= user.f_lineno <= s.last]
        if not current:
            return
        needs = set().union(*(s.reads for s in current))
        names = _Names(user)
        batch, needs = _slice(statements, needs, names)
        names.close()
        batch -= {line for s in current for line in range(s.first, s.last + 1)}
        called = user.f_code.co_filename, user.f_code.co_qualname
        for s in (*current, *(s for s in statements if not needs.isdisjoint(s.gives))):
            needed.update((called[0], line, called[1]) for line in range(s.first, s.last + 1))
        for line in batch:
            yield user.f_code.co_filename, line, user.f_code.co_qualname
        needs &= set(_arguments(user.f_code))
        if not needs:
            return


def _arguments(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# -- the source --------------------------------------------------------------------------------------------------------


class Statement(Struct, frozen=True):
    """The names that a statement, or the head of a compound one, reads and assigns (`gives`)."""

    first: int
    last: int
    reads: frozenset[str]
    gives: frozenset[str]


def _tree(file: str, code: str) -> ast.Module:
    return ast.parse(code if file == CELL_WITHOUT_IPYTHON else "".join(linecache.getlines(file)))


def _scope(tree: ast.Module, code: CodeType) -> ast.AST | None:
    """The syntax tree of this code object."""
    if code.co_name == "<module>":
        return tree
    return next(
        (n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS) and n.name == code.co_name and _begins(n, code)), None
    )


def _begins(node: ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType) -> bool:
    return code.co_firstlineno in (node.lineno, *(d.lineno for d in node.decorator_list))


def _statements(scope: ast.AST) -> Iterator[Statement]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.stmt):
            yield from _statement(node)
        yield from _statements(node)


def _statement(node: ast.stmt) -> Iterator[Statement]:
    """The head of a statement, if it assigns something or may change the object whose method it calls."""
    if isinstance(node, ast.For | ast.AsyncFor):
        yield _of([node.iter, node.target], [node.target], [node.iter])
    elif isinstance(node, ast.With | ast.AsyncWith):
        for item in node.items:
            targets = [item.optional_vars] if item.optional_vars is not None else []
            yield _of([item.context_expr], targets, [item.context_expr])
    elif isinstance(node, ast.Assign):
        yield _of([node], node.targets, [node.value, *(t for t in node.targets if not isinstance(t, ast.Name))])
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        reads = [node.target] if isinstance(node, ast.AugAssign) else []
        yield _of([node], [node.target], [*reads, *([node.value] if node.value is not None else [])])
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        changed = [called.value] if isinstance(called, ast.Attribute) else []
        yield _of([node], changed, [node.value])
    elif isinstance(node, ast.Expr | ast.Return):
        yield _of([node], [], [node])


def _of(where: list[ast.AST], gives: list[Any], reads: list[Any]) -> Statement:
    first = min(node.lineno for node in where)  # type: ignore[attr-defined]  # statements and expressions alone
    last = max(node.end_lineno or node.lineno for node in where)  # type: ignore[attr-defined]
    return Statement(first, last, _names(reads), frozenset(n for g in gives for n in _target_names(g)))


def _target_names(target: ast.AST) -> Iterator[str]:
    """The names that a target assigns in whole or in part."""
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _target_names(element)
    elif isinstance(target, ast.Starred | ast.Subscript):
        yield from _target_names(target.value)
    elif dotted := _dotted(target):
        yield dotted


def _names(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """All names that are read; `self.model` is one name."""
    return frozenset(name for node in nodes for name in _read(node))


def _read(node: ast.AST) -> Iterator[str]:
    if dotted := _dotted(node):
        yield dotted
        parts = dotted.split(".")
        yield from (".".join(parts[:i]) for i in range(1, len(parts)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _read(child)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (of := _dotted(node.value)):
        return f"{of}.{node.attr}"
    return ""


# -- slicing -----------------------------------------------------------------------------------------------------------


def _slice(statements: tuple[Statement, ...], needs: set[str], names: _Names) -> tuple[set[int], set[str]]:
    """The lines that make the data on which these names depend, and all names on the way."""
    models = _of_models(statements, names)
    visited, waiting = set[str](), set(needs)
    lines, others = set[int](), set[int]()
    while waiting:
        name = waiting.pop()
        visited.add(name)
        for s in statements:
            if name not in s.gives:
                continue
            waiting |= s.reads - visited
            if s not in models:
                lines.update(range(s.first, s.last + 1))
    for s in models:
        others.update(range(s.first, s.last + 1))
    return lines - others, visited


def _of_models(statements: tuple[Statement, ...], names: _Names) -> set[Statement]:
    """Statements that are part of the training itself: they use a network, or the result of one."""
    models: set[Statement] = set()
    tainted = {n for s in statements for n in s.reads | s.gives if names.trains(n)}
    while True:
        fresh = {s for s in statements if s not in models and not tainted.isdisjoint(s.reads | s.gives)}
        if not fresh:
            return models
        models |= fresh
        tainted |= {n for s in fresh for n in s.gives}


class _Names:
    """The values of names in a frame, until `close`."""

    def __init__(self, frame: FrameType) -> None:
        self._globals = frame.f_globals
        names: Any = frame.f_locals
        self._locals: Any = names.data if isinstance(names, UserDict) else names  # a UserDict may record reads
        self._is_copy = type(self._locals) is dict and self._locals is not frame.f_globals

    def close(self) -> None:
        """Before Python 3.13 a frame keeps this copy of its locals, and with it a loss's graph: empty the copy."""
        if self._is_copy and sys.getrefcount(self._locals) <= 3:  # no other reference to it
            self._locals.clear()
        self._locals = self._globals = {}

    def trains(self, name: str) -> bool:
        first, *rest = name.split(".")
        value = self._locals.get(first, self._globals.get(first))
        for attribute in rest:
            if _trains(value):
                return True
            value = getattr(value, "__dict__", {}).get(attribute, getattr(type(value), attribute, None))
        return _trains(value)


def _trains(value: Any, depth: int = 0) -> bool:
    """Whether a value is a network, an optimizer, a tensor with gradients, or a function that uses one of these."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, torch.nn.Module):
        return next(value.parameters(), None) is not None
    if isinstance(value, torch.optim.Optimizer):
        return True
    if depth > _DEEP:
        return False
    if isinstance(value, MethodType):
        return _trains(value.__self__, depth + 1) or _trains(value.__func__, depth + 1)
    if isinstance(value, FunctionType):
        return owners[value.__code__.co_filename] is Owner.USER and any(_trains(v, depth + 1) for v in _used(value))
    if isinstance(value, list | tuple | dict):
        inside = list(value.values() if isinstance(value, dict) else value)[:_INSIDE]
        return any(_trains(v, depth + 1) for v in inside)
    return False


def _used(function: FunctionType) -> Iterator[Any]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
