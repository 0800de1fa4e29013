"""Run a cell's text as IPython runs a cell, without nesting a `run_cell`, which would hide failures from Run All."""

from __future__ import annotations

import ast
import inspect
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import CodeType, FrameType, MethodType, TracebackType
from typing import Any

from msgspec import Struct

from gpulab.errors import UsageError
from gpulab.user_code import runs_users_code

runs_users_code(__file__)

AWAIT = (
    "This cell awaits at its top level, which a magic cannot do. Write instead: "
    'async with gpulab.profile("name") as p: and put the code inside.'
)

# What Python's parser and compiler raise.
_COMPILE_ERRORS = (SyntaxError, OverflowError, ValueError, TypeError, MemoryError)


class Cell(Struct, frozen=True):
    """A parsed cell. `silent`: it ends in a semicolon."""

    name: str
    tree: ast.Module
    silent: bool
    interactivity: str

    def run(self, shell: Any, local_ns: MutableMapping[str, Any] | None = None) -> Any:
        """Run in the user's namespace, each part compiled just before it runs; return the last expression's value."""
        names = shell.user_ns if local_ns is None else local_ns
        silently, displayed, last = _interactive(list(self.tree.body), self.interactivity)
        for node in silently:
            exec(_code(shell, ast.Module([node], []), self.name), shell.user_global_ns, names)
        for node in displayed:
            exec(_code(shell, ast.Interactive([node]), self.name), shell.user_global_ns, names)
        if last is None:
            return None
        return eval(_code(shell, ast.Expression(last.value), self.name), shell.user_global_ns, names)


def shell() -> Any:
    """IPython's shell in a notebook or its terminal; else None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


@contextmanager
def silence() -> Iterator[None]:
    """Hides everything that is printed or displayed inside.

    Enter it outside `users_code`: an interrupt while it is entered or left would silence the notebook for good.
    """
    if shell() is None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
        return
    from IPython.utils.capture import capture_output

    with capture_output():
        yield


def parsed(shell: Any, text: str) -> Cell:
    """Transform and parse a cell as IPython does, so that tracebacks and `inspect.getsource` find its lines.

    Raises SyntaxError as the cell alone would, and UsageError if it awaits at its top level.
    """
    source = shell.transform_cell(text)
    name = shell.compile.cache(source, shell.displayhook.prompt_count, raw_code=text.removesuffix("\n"))
    try:
        tree = shell.compile.ast_parse(source, filename=name)
    except _COMPILE_ERRORS as e:
        raise e.with_traceback(None) from None  # the parser's own frames are not the user's
    tree = shell.transform_ast(tree)
    if shell.autoawait and any(map(_awaits, tree.body)):
        raise UsageError(AWAIT)
    silent = shell.displayhook.semicolon_at_end_of_expression(source)
    return Cell(name, tree, silent, "none" if silent else shell.ast_node_interactivity)


def _interactive(nodes: list[ast.stmt], interactivity: str) -> tuple[list[ast.stmt], list[ast.stmt], ast.Expr | None]:
    """Split into silent statements, statements shown as they run, and the last expression."""
    if interactivity == "last_expr_or_assign":
        name = _assigned(nodes[-1]) if nodes else None
        if name is not None:
            nodes = [*nodes, ast.fix_missing_locations(ast.Expr(ast.Name(name, ast.Load())))]
    if interactivity == "none" or not nodes:
        return nodes, [], None
    silent, displayed = ([], nodes) if interactivity == "all" else (nodes[:-1], nodes[-1:])
    last = nodes[-1]
    if isinstance(last, ast.Expr):
        return silent, displayed[:-1], last
    return (silent, displayed, None) if interactivity in ("all", "last") else (nodes, [], None)


def _assigned(node: ast.stmt) -> str | None:
    target: ast.expr | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        target = node.target
    return target.id if isinstance(target, ast.Name) else None


def _awaits(node: ast.AST) -> bool:
    """Whether `node` awaits outside any function."""
    if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.GeneratorExp):
        return False
    if isinstance(node, ast.comprehension) and node.is_async:
        return True
    return any(map(_awaits, ast.iter_child_nodes(node)))


def _code(shell: Any, tree: ast.Module | ast.Interactive | ast.Expression, name: str) -> CodeType:
    mode = {ast.Module: "exec", ast.Interactive: "single", ast.Expression: "eval"}[type(tree)]
    try:
        with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0):
            code: CodeType = shell.compile(tree, name, mode)
    except _COMPILE_ERRORS as e:
        raise e.with_traceback(None) from None
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError(AWAIT)
    return code


def show_as_bare(shell: Any, error: BaseException) -> None:
    """Let IPython show an exception that is about to leave the magic as if the cell had run without it.

    `error.__traceback__` holds the user's frames only. On its way up the error collects frames of IPython and of the
    magic. A hook for custom exceptions removes them when IPython shows the error. The hook is then removed, at the
    latest when the cell has ended.
    """
    frames = error.__traceback__
    custom_exceptions, custom_show = shell.custom_exceptions, shell.CustomTB

    def undo() -> None:
        if shell.CustomTB is ours:
            shell.custom_exceptions, shell.CustomTB = custom_exceptions, custom_show
            shell.events.unregister("post_execute", undo)

    def show(
        self: Any, kind: type[BaseException], arrived: BaseException, trace: TracebackType, tb_offset: Any = None
    ) -> None:
        undo()
        if arrived is error:
            trace.tb_next = frames
        if isinstance(arrived, custom_exceptions):
            custom_show(kind, arrived, trace)
        elif frames is None and arrived is error and isinstance(error, _COMPILE_ERRORS):
            if isinstance(error, IndentationError):
                shell.showindentationerror()
            else:
                shell.showsyntaxerror()
        else:
            shell.showtraceback(running_compiled_code=True)

    ours = MethodType(show, shell)
    shell.custom_exceptions, shell.CustomTB = (*custom_exceptions, type(error)), ours
    shell.events.register("post_execute", undo)


PATIENCE_S = 3.0  # a second interrupt after this time is raised at once


class Interrupted(KeyboardInterrupt):
    """Ends a cell after its result was shown. A notebook shows one line: a traceback would name gpulab's code."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Interrupt(Struct):
    """Whether an interrupt came. `error`: the exception that it raised, or would have raised in the user's code."""

    error: BaseException | None = None


class _Now(Struct):
    """The main thread's state: whether it runs the user's code, and when the last interrupt came."""

    in_code: bool = False
    last_s: float | None = None

    def raises(self) -> bool:
        now_s, last_s = time.monotonic(), self.last_s
        self.last_s = now_s
        return self.in_code or (last_s is not None and now_s - last_s > PATIENCE_S)


_now = _Now()


@contextmanager
def on_interrupt(stop: Callable[[], None]) -> Iterator[Interrupt]:
    """Inside, an interrupt calls `stop`; within `users_code` the previous handler then runs. Main thread only."""
    interrupt, own = Interrupt(), os.getpid()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupt
        return
    nested = getattr(before, "is_of_gpulab", False)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != own:  # worker processes inherit it
            before(number, frame)
            return
        stop()
        try:
            if nested or _now.raises():
                before(number, frame)
        except BaseException as e:
            interrupt.error = e
            raise
        interrupt.error = interrupt.error or KeyboardInterrupt()

    handle.is_of_gpulab = True  # type: ignore[attr-defined]
    if not nested:
        _now.in_code, _now.last_s = False, None
    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, before)


@contextmanager
def users_code() -> Iterator[None]:
    """Encloses the user's code: inside, an interrupt may be raised."""
    ours = threading.current_thread() is threading.main_thread()
    try:
        if ours:
            _now.in_code = True
        yield
    finally:
        if ours:
            _now.in_code = False
