"""The user's code, a function or the text of a cell, that can be run again and again."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from types import FunctionType
from typing import Any, Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import UsageError
from gpulab.knobs.variables import Plain, Variables, names_in, replace_literals
from gpulab.tuning.cell_code import Cell
from gpulab.user_code import CELL_WITHOUT_IPYTHON, runs_users_code

runs_users_code(__file__)


class Code(Protocol):
    """The code of the user that is run again and again, unmodified.

    `names` are those of `namespace` that it uses itself; None: it may use all. `roots` are objects besides, from which
    its state is reached; `variables` those that can be set.
    """

    @property
    def text(self) -> str: ...
    @property
    def source(self) -> Literal["cell", "statement", "block", "script"]: ...
    @property
    def namespace(self) -> dict[str, Any]: ...
    @property
    def names(self) -> frozenset[str] | None: ...
    @property
    def roots(self) -> tuple[object, ...]: ...
    @property
    def variables(self) -> Variables: ...

    def run(self) -> object:
        """Run it once, as the user would; its exceptions pass."""

    def replacing(self, variables: Mapping[str, Plain]) -> Code:
        """The same code with these of the literals replaced that it assigns at its top."""

    def through(self, names: MutableMapping[str, Any]) -> Code:
        """The same code, whose own lines use its namespace through this."""


class FunctionCode(Struct, frozen=True):
    """A function without arguments. Its variables are those of the module or notebook where it was written."""

    function: Callable[[], object]
    source: Literal["block"] = "block"

    @property
    def text(self) -> str:
        """The function's source; empty where Python cannot find it."""
        try:
            return inspect.getsource(self.function)
        except (OSError, TypeError):
            return ""

    @property
    def namespace(self) -> dict[str, Any]:
        names: dict[str, Any] = getattr(inspect.unwrap(self.function), "__globals__", {})
        return names

    @property
    def names(self) -> frozenset[str]:
        """None of its globals is read by a name of its own: all that it reads is reached through the function."""
        return frozenset()

    @property
    def roots(self) -> tuple[object, ...]:
        return (self.function,)

    def run(self) -> object:
        return self.function()

    @property
    def variables(self) -> Variables:
        function = inspect.unwrap(self.function)
        if isinstance(function, FunctionType):
            return Variables.of_function(function)
        return Variables({}, frozenset(), {})

    def replacing(self, variables: Mapping[str, Plain]) -> FunctionCode:
        """The same function: it has no literals at its top."""
        return self

    def through(self, names: MutableMapping[str, Any]) -> FunctionCode:
        """The same function: it has no lines outside of itself."""
        return self


class TextCode(Struct, frozen=True):
    """The text of a cell that runs in `namespace`. `execute` runs a tree, whose lines use these names."""

    text: str
    namespace: dict[str, Any]
    tree: ast.Module
    execute: Callable[[ast.Module, MutableMapping[str, Any]], object]
    source: Literal["cell", "statement", "script"] = "cell"
    seen_through: MutableMapping[str, Any] | None = None

    @classmethod
    def parsed(cls, text: str, namespace: dict[str, Any]) -> TextCode:
        """Without IPython, and so without its syntax. Raises UsageError where it does not parse."""

        def execute(tree: ast.Module, names: MutableMapping[str, Any]) -> None:
            exec(compile(tree, CELL_WITHOUT_IPYTHON, "exec"), namespace, names)

        try:
            return cls(text, namespace, ast.parse(text), execute)
        except SyntaxError as e:
            raise UsageError(f"The code does not parse: {e}.") from None

    @classmethod
    def of_cell(
        cls,
        shell: Any,
        text: str,
        cell: Cell,
        source: Literal["cell", "statement"] = "cell",
        local_ns: dict[str, Any] | None = None,
    ) -> TextCode:
        """As IPython runs it, in the user's namespace."""

        def execute(tree: ast.Module, names: MutableMapping[str, Any]) -> object:
            return replace(cell, tree=tree).run(shell, names)

        return cls(text, shell.user_ns if local_ns is None else local_ns, cell.tree, execute, source)

    @property
    def names(self) -> frozenset[str]:
        return names_in(self.tree)

    @property
    def roots(self) -> tuple[object, ...]:
        return ()

    @property
    def variables(self) -> Variables:
        return Variables.of(self.tree, self.namespace)

    def run(self) -> object:
        """Run it; the value of its last expression, where IPython gives one."""
        return self.execute(self.tree, self.namespace if self.seen_through is None else self.seen_through)

    def replacing(self, variables: Mapping[str, Plain]) -> TextCode:
        return replace(self, tree=replace_literals(self.tree, variables)) if variables else self

    def through(self, names: MutableMapping[str, Any]) -> TextCode:
        return replace(self, seen_through=names)
