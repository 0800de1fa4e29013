"""The user's code, a function or the text of a cell, that can be run again and again."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from types import FunctionType
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from gpulab.errors import UsageError
from gpulab.knobs.variables import Plain, Variables, names_in, replace_literals
from gpulab.tuning.cell_code import Cell
from gpulab.user_code import CELL_WITHOUT_IPYTHON, runs_users_code

runs_users_code(__file__)


class Code(Struct, frozen=True):
    """The user's code, which is run again and again, unmodified: a tree that `execute` runs, or a function.

    A cell runs in `namespace`. A function has no arguments; its variables are the globals of the module or notebook
    that defines it, and its state is reached through the function object.
    """

    text: str  # empty if Python cannot find it
    source: Literal["cell", "statement", "block", "script"]
    namespace: dict[str, Any]
    execute: Callable[[ast.Module, MutableMapping[str, Any]], object]
    tree: ast.Module
    function: Callable[[], object] | None = None
    own_names: MutableMapping[str, Any] | None = None  # its own lines use the namespace through it; None: directly

    @classmethod
    def of_function(cls, function: Callable[[], object]) -> Code:
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError):
            text = ""
        namespace = getattr(inspect.unwrap(function), "__globals__", {})
        return cls(text, "block", namespace, lambda tree, names: function(), ast.Module([], []), function)

    @classmethod
    def of_text(cls, text: str, namespace: dict[str, Any]) -> Code:
        """Code without IPython, and so without its syntax. Raises UsageError if it does not parse."""

        def execute(tree: ast.Module, names: MutableMapping[str, Any]) -> None:
            exec(compile(tree, CELL_WITHOUT_IPYTHON, "exec"), namespace, names)

        try:
            return cls(text, "cell", namespace, execute, ast.parse(text))
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
    ) -> Code:
        """Code that runs as IPython runs it, in the user's namespace."""

        def execute(tree: ast.Module, names: MutableMapping[str, Any]) -> object:
            return replace(cell, tree=tree).run(shell, names)

        return cls(text, source, shell.user_ns if local_ns is None else local_ns, execute, cell.tree)

    @property
    def names(self) -> frozenset[str]:
        """Names of the namespace that its own lines use; none for a function, whose reads are reached through it."""
        return names_in(self.tree)

    @property
    def roots(self) -> tuple[object, ...]:
        """Further objects from which its state is reached."""
        return () if self.function is None else (self.function,)

    @property
    def variables(self) -> Variables:
        """The variables that can be set."""
        if self.function is None:
            return Variables.of(self.tree, self.namespace)
        function = inspect.unwrap(self.function)
        return Variables.of_function(function) if isinstance(function, FunctionType) else Variables({}, frozenset(), {})

    def run(self) -> object:
        """Run it once, as the user would; its exceptions pass. Returns the value of its last expression, if any."""
        return self.execute(self.tree, self.namespace if self.own_names is None else self.own_names)

    def replacing(self, variables: Mapping[str, Plain]) -> Code:
        """The same code with new values for literals that it assigns at its top level."""
        return replace(self, tree=replace_literals(self.tree, variables)) if variables else self

    def through(self, names: MutableMapping[str, Any]) -> Code:
        """The same code, whose own lines use its namespace through `names`."""
        return replace(self, own_names=names)
