"""The names that Dynamo leaves in the namespace of code it compiled, taken out when nothing runs by them any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

# torch 2.13: aliases of modules, compiled functions, resumed frames, builtins
DYNAMOS = ("__import_", "__compiled_fn", "__resume_at", "__builtins_dict__")


class DynamoNames:
    """Namespaces of the modules that are to be compiled, as they were before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}

    def meet(self, module: Module) -> None:
        """This module is about to be compiled."""
        for part in module.modules():
            forward = getattr(type(part), "forward", None)
            names = getattr(forward, "__globals__", None)
            if names is not None:
                self._before.setdefault(id(names), (names, frozenset(n for n in names if n.startswith(DYNAMOS))))

    def take_out(self) -> None:
        """All that came since; what was compiled must be dropped by now, for it reads them."""
        for names, before in self._before.values():
            for name in [n for n in names if n.startswith(DYNAMOS) and n not in before]:
                del names[name]
        self._before.clear()


__all__ = ["DynamoNames"]
