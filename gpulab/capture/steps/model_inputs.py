"""How many values a model that several ranks train is given in each step: its samples, however long they are.

A DataLoader knows what it has given, not what the loop has left out of it, and a loop may have none.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import numpy as np

from gpulab.run import Int64, Steps
from gpulab.torch_hooks.patching import Args, KeywordArgs, heard_before

KEPT_CALLS = 65_536  # the last: two numbers each
_DEPTH, _MOST_PARTS = 4, 1_000  # of nested arguments: longer lists hold no tensors


class ModelInputs:
    """Of the calls that gradients may follow: of DistributedDataParallel, else of the first module that learns."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, int]] = deque(maxlen=KEPT_CALLS)
        self._first = ExitStack()  # hears of that module
        self._wrapped = False  # in DistributedDataParallel

    def hear_first(self) -> None:
        """Find the first module that is called and learns, on this thread, and hear of its calls from then on."""
        from torch import is_grad_enabled
        from torch.compiler import is_compiling
        from torch.nn.modules.module import register_module_forward_pre_hook

        thread = get_ident()

        def find(module: Any, args: Any) -> None:
            if is_compiling() or get_ident() != thread or not is_grad_enabled():
                return
            if any(p.requires_grad for p in module.parameters()):
                first = weakref.ref(module)
                self._first.close()
                self._first.enter_context(
                    heard_before(type(module), "forward", lambda a, k: self._heard(first(), a, k))
                )

        self._first.callback(register_module_forward_pre_hook(find).remove)

    def close(self) -> None:
        """Hear no more of it: the run is over, something is compiled, or DistributedDataParallel tells."""
        self._first.close()

    def called(self, args: Args, kwargs: KeywordArgs) -> None:
        """DistributedDataParallel is, with these."""
        if not self._wrapped:
            self._wrapped = True
            self._first.close()
            self._calls.clear()
        self._count(args, kwargs)

    def _heard(self, first: Any, args: Args, kwargs: KeywordArgs) -> None:
        if first is not None and args[:1] and args[0] is first:
            self._count(args, kwargs)

    def _count(self, args: Args, kwargs: KeywordArgs) -> None:
        from torch import is_grad_enabled

        if not is_grad_enabled():
            return
        try:
            count = _values_in([args[1:], kwargs])
        except Exception:  # a tensor of the user's own kind may answer anything; their step goes on
            count = 0
        self._calls.append((perf_counter_ns(), count or -1))

    def values_of(self, steps: Steps, origin_ns: int) -> Int64:
        """Of all calls in each step; -1 where one is not known or there is none, empty without any call.

        `origin_ns` is the time at 0 of the steps.
        """
        if not self._calls:
            return Steps.empty().input_values
        calls = np.array(self._calls, dtype=np.int64)
        at_ns, counts = calls[:, 0] - origin_ns, calls[:, 1]
        first, after = np.searchsorted(at_ns, steps.start_ns), np.searchsorted(at_ns, steps.end_ns)
        sums, misses = (np.concatenate(([0], np.cumsum(of))) for of in (counts, counts < 0))
        whole = (after > first) & (misses[after] == misses[first])
        if len(calls) == self._calls.maxlen:  # earlier ones are gone
            whole &= steps.start_ns >= at_ns[0]
        return np.where(whole, sums[after] - sums[first], -1).astype(np.int64)


def _values_in(argument: object, depth: int = 0) -> int:
    """In all tensors of it: rows alone say nothing of sequences of unequal length."""
    if isinstance(argument, list | tuple | Mapping) and depth < _DEPTH:
        parts = argument.values() if isinstance(argument, Mapping) else argument
        return sum(_values_in(part, depth + 1) for part in islice(parts, _MOST_PARTS))
    count = getattr(argument, "numel", None)
    return int(count()) if callable(count) else 0
