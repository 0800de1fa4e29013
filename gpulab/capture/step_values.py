"""The loss of each step of an unmodified loop, and how many values a model that ranks train is given in it.

A loss is where a backward pass begins. It is read when the run is over, because reading it waits for the device. A
DataLoader knows what it has given, not what the loop has left out of it, and a loop may have none.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import numpy as np

from gpulab.capture.loader_facts import arrays_in
from gpulab.devices.gpus import in_graph_capture
from gpulab.run import Int64, Steps
from gpulab.torch_hooks.patching import Args, KeywordArgs, before_calls, replaced

LIMIT = 10_000  # losses kept; on a GPU each holds a block of 512 bytes


class Losses:
    """Scalars from which backward passes began. Reading them waits for the device, so that comes last."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, Any]] = []
        self._scaled: tuple[Any, Any] | None = None  # what GradScaler.scale last gave, and from what

    @contextmanager
    def heard(self) -> Iterator[Losses]:
        """Hear the backward passes of this thread. Entered last: knobs that scale the loss come after us."""
        from torch import autograd
        from torch.amp import GradScaler

        thread = get_ident()

        def wrap_scale(original: Any) -> Any:
            @functools.wraps(original)
            def scale(scaler: Any, outputs: Any) -> Any:
                result = original(scaler, outputs)
                if get_ident() == thread:
                    self._scaled = result, outputs
                return result

            return scale

        try:
            with before_calls(autograd, "backward", self._hear), replaced(GradScaler, "scale", wrap_scale):
                yield self
        finally:
            self._scaled = None

    def _hear(self, args: Args, kwargs: KeywordArgs) -> None:
        """Keep this loss. A fault of ours must not become one of the user's backward pass."""
        root: Any = args[0] if args else kwargs.get("tensors")
        if self._scaled is not None and root is self._scaled[0]:
            root = self._scaled[1]
        if getattr(root, "numel", None) is None or len(self._seen) >= LIMIT:
            return
        with suppress(Exception):  # a tensor type of the user's, or a GPU whose error stays
            if root.numel() == 1 and not in_graph_capture():  # there it has a value only when the graph is replayed
                self._seen.append((perf_counter_ns(), _kept(root)))

    def per_step(self, steps: Steps, origin_ns: int) -> tuple[float, ...]:
        """The mean loss of each step, NaN where it had none. `origin_ns`: 0 of the steps' clock. Forgets them."""
        seen, self._seen = self._seen, []
        sums, counts = np.zeros(len(steps)), np.zeros(len(steps))
        times = np.array([t - origin_ns for t, _ in seen], dtype=np.int64)
        rows = np.searchsorted(steps.start_ns, times, side="right") - 1
        for row, t_ns, (_, loss) in zip(rows, times, seen, strict=True):
            if row >= 0 and t_ns <= steps.end_ns[row]:
                sums[row] += _value(loss)
                counts[row] += 1
        with np.errstate(invalid="ignore"):
            return tuple((sums / np.where(counts == 0, np.nan, counts)).tolist())


def _kept(loss: Any) -> Any:
    """The loss without its graph; copied, which is one more launch, only where its memory may be written again."""
    kept = loss.detach()
    return kept.clone() if loss.is_cuda and not _has_memory_of_its_own(loss) else kept


def _has_memory_of_its_own(loss: Any) -> bool:
    """Whether an operator of torch's own made it. A compiled module gives memory that its CUDA graph writes again.

    That holds also for a view of what it gave, and after an operator in place (`loss /= 4`).
    """
    from torch.autograd.function import BackwardCFunction

    return loss._base is None and loss._version == 0 and not isinstance(loss.grad_fn, BackwardCFunction)


def _value(loss: Any) -> float:
    """NaN where it cannot be read: its memory was given away, or the GPU fails."""
    try:
        return float(loss)
    except RuntimeError:
        return math.nan


KEPT_CALLS = 65_536  # the last: two numbers each


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
                    before_calls(type(module), "forward", lambda a, k: self._heard(first(), a, k))
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
            parts = arrays_in([args[1:], kwargs])  # rows alone say nothing of sequences of unequal length
            count = sum(int(part.numel()) for part in parts if hasattr(part, "numel"))
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
