"""Tell whether weights are updated by hand: where no optimizer steps, that is what makes a batch a training step."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from gpulab.devices.gpus_in_use import in_graph_capture

_VALUES = 16
_NODES = 1000


class WeightWatch:
    """Remembers a few values of one trained tensor: the nearest to the loss, whose gradient is seldom zero."""

    def __init__(self, leaf: Any) -> None:
        self._leaf = weakref.ref(leaf)
        self._seen = _values(leaf)

    @classmethod
    def of(cls, root: Any) -> WeightWatch | None:
        """WeightWatch what the backward pass from `root` (a tensor or several) trains.

        None where there is nothing, and while a CUDA graph is captured: the values would be those of its replay.
        """
        try:
            leaf = None if in_graph_capture() else _nearest_leaf(root)
            return None if leaf is None else cls(leaf)
        except Exception:  # a user's tensor type may refuse anything
            return None

    def changed(self) -> bool:
        """Whether the values differ from those seen first. On a GPU this waits for the device, but in no capture."""
        leaf = self._leaf()
        try:
            return leaf is not None and not in_graph_capture() and bool((_values(leaf) != self._seen).any())
        except Exception:
            return False


def _nearest_leaf(root: Any) -> Any | None:
    """Breadth first through autograd's graph to the first tensor that accumulates a gradient."""
    roots = [root] if hasattr(root, "grad_fn") else list(root)
    waiting = deque(r.grad_fn for r in roots if r.grad_fn is not None)
    for _ in range(_NODES):
        if not waiting:
            return None
        node = waiting.popleft()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return leaf
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return None


def _values(leaf: Any) -> Any:
    return leaf.detach().reshape(-1)[:_VALUES].clone()
