"""Code around which something happens in each run: all else is the code's own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from gpulab.knobs.variables import Plain, Variables
from gpulab.tuning.plan import Code


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Subclasses add `run`."""

    code: Code

    @property
    def text(self) -> str:
        """Its source."""
        return self.code.text

    @property
    def source(self) -> Literal["cell", "statement", "block", "script"]:
        """What it is."""
        return self.code.source

    @property
    def namespace(self) -> dict[str, Any]:
        """The live names it reads and assigns."""
        return self.code.namespace

    @property
    def names(self) -> frozenset[str] | None:
        """Those that it uses itself; None: it may use all."""
        return self.code.names

    @property
    def roots(self) -> tuple[object, ...]:
        """Objects besides from which its state is reached."""
        return self.code.roots

    @property
    def variables(self) -> Variables:
        """Those that can be set."""
        return self.code.variables

    def replacing(self, variables: Mapping[str, Plain]) -> Self:
        """The same code with these variables set."""
        return replace(self, code=self.code.replacing(variables))

    def through(self, names: MutableMapping[str, Any]) -> Self:
        """The same code, whose own lines use its namespace through this."""
        return replace(self, code=self.code.through(names))
