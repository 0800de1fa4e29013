"""Code that starts its own ranks: ranks that run as scripts are recorded; for forked ones a replacement is proposed.

Sources: Accelerate, "Launching Accelerate training in a notebook"; Lightning, `strategy`; PyTorch,
`torch.multiprocessing.spawn`.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpulab.knobs.variables import setting_names

_OF_ACCELERATE = "notebook_launcher"
_OF_TORCH = ("spawn", "start_processes")
_OF_LIGHTNING = ("ddp_notebook", "ddp_fork", "ddp_spawn")
_MODULES = ("mp", "multiprocessing", "torch.multiprocessing")
_OF_IPYTHON = re.compile(r"(?m)^(\s*)[!%].*$")
_RANK = 'int(os.environ["RANK"])'


class OwnRanks(Struct, frozen=True):
    """`starter`: the word in the code; `instead`: its replacement; `line`: its line number.

    `ranks`: how many ranks it starts; "N" if the code does not say.
    """

    starter: str
    instead: str
    ranks: str
    line: int


def own_ranks(code: str, *, sure: bool = False) -> OwnRanks | None:
    """The first call in the code that starts ranks; `sure`: only a call that runs whenever the code runs."""
    try:
        tree = ast.parse(_OF_IPYTHON.sub(r"\1pass", code))
    except (SyntaxError, ValueError):
        return None
    calls = (node for node in (_always(tree.body) if sure else ast.walk(tree)) if isinstance(node, ast.Call))
    first = next((own for call in calls if (own := _of_call(call)) is not None), None)
    if first is None or "MASTER_PORT" not in code:
        return first
    return replace(first, instead=f"{first.instead}, without MASTER_PORT,")


def _always(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that run in any case: no definitions, no branches except `if __name__ == …`."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test).startswith("__name__"):
            yield from _always(statement.body)
        elif isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
            yield from ast.walk(statement)


def _of_call(call: ast.Call) -> OwnRanks | None:
    holder, name = _name(call.func)
    if name == _OF_ACCELERATE:
        direct = _direct_call(_argument(call, 0, "function"), _argument(call, 1, "args"))
        return _instead_of(call, name, direct, "num_processes", 2)
    if name in _OF_TORCH and (holder in _MODULES or _argument(call, 2, "nprocs") is not None):
        starter = f"{holder}.{name}" if holder else name
        direct = _direct_call(_argument(call, 0, "fn"), _argument(call, 1, "args"), _RANK)
        return _instead_of(call, starter, direct, "nprocs", 2)
    strategy = _argument(call, 99, "strategy")
    text = strategy.value if isinstance(strategy, ast.Constant) else None
    if isinstance(text, str) and text.startswith(_OF_LIGHTNING):
        return _instead_of(call, f'strategy="{text}"', 'strategy="ddp"', "devices", 99)
    return None


def _instead_of(call: ast.Call, starter: str, instead: str, count: str, place: int) -> OwnRanks:
    number = _argument(call, place, count)
    count_text = str(number.value) if isinstance(number, ast.Constant) and isinstance(number.value, int) else "N"
    return OwnRanks(starter, instead, count_text, call.lineno)


def _direct_call(function: ast.expr | None, arguments: ast.expr | None, *first: str) -> str:
    """A direct call of the function, with the arguments `first`, then the elements of the tuple or list."""
    text = ast.unparse(function) if isinstance(function, ast.Name | ast.Attribute) else "the function"
    rest: list[str] = []
    if isinstance(arguments, ast.Tuple | ast.List):
        rest = [ast.unparse(e) for e in arguments.elts]
    elif arguments is not None:
        rest = [f"*{ast.unparse(arguments)}"]
    return f"{text}({', '.join([*first, *rest])})"


def _argument(call: ast.Call, place: int, name: str) -> ast.expr | None:
    keyword = next((k.value for k in call.keywords if k.arg == name), None)
    return keyword if keyword is not None else (call.args[place] if place < len(call.args) else None)


def _name(function: ast.expr) -> tuple[str, str]:
    """The module or object before the dot, and the name after it."""
    if isinstance(function, ast.Attribute):
        return ast.unparse(function.value), function.attr
    return "", function.id if isinstance(function, ast.Name) else ""


FOLLOW = "GPULAB_FOLLOW"
_FOLDER = str(Path(__file__).parent / "follow")
_PATH = "PYTHONPATH"


@contextmanager
def followed_ranks(
    options: Sequence[str], names: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Inside, child processes that become ranks run under `gpulab record` with these options and variables.

    Does nothing if this process is itself a rank: its parent records the other ranks.
    """
    if is_rank(environment) or FOLLOW in environment:
        yield
        return
    before = environment.get(_PATH)
    path = os.pathsep.join(filter(None, (_FOLDER, before)))
    with setting_names(environment, {**names, FOLLOW: "\n".join(options)}):
        environment[_PATH] = path
        try:
            yield
        finally:
            _put_back(environment, path, before)


def _put_back(environment: MutableMapping[str, str], ours: str, before: str | None) -> None:
    """Restore the path. A path that the code inside has set stays, without gpulab's folder."""
    present = environment.get(_PATH)
    if present is None:
        return
    if present != ours:
        before = os.pathsep.join(part for part in present.split(os.pathsep) if part != _FOLDER)
    if before:
        environment[_PATH] = before
    else:
        del environment[_PATH]


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of several."""
    return any(name in environment for name in ("LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
