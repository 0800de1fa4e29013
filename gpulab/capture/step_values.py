"""Records two values per step of an unmodified loop: its loss, and the size of the model's inputs.

A loss is the scalar from which a backward pass starts. It is read at the end of the run, because reading it waits for
the device. Input sizes are counted at the model, as a loop may have no DataLoader, or use only a part of its batches.
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
from gpulab.torch_hooks.hook_points import module_calls
from gpulab.torch_hooks.patching import Args, KeywordArgs, before_calls, replaced

LIMIT = 10_000  # losses; on a GPU each occupies a block of 512 bytes


class Losses:
    """The scalars from which backward passes started; they are read at the end."""

    def __init__(self) -> None:
        self._scalars: list[tuple[int, Any]] = []
        self._scaled: tuple[Any, Any] | None = None  # the newest result of GradScaler.scale, and its argument

    @contextmanager
    def recording(self) -> Iterator[Losses]:
        """Record the losses of this thread inside. To be entered last, so that knobs scale a loss only after it."""
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
            with before_calls(autograd, "backward", self._add), replaced(GradScaler, "scale", wrap_scale):
                yield self
        finally:
            self._scaled = None

    def _add(self, args: Args, kwargs: KeywordArgs) -> None:
        """Add this loss. A fault of gpulab must not break the user's backward pass."""
        root: Any = args[0] if args else kwargs.get("tensors")
        if self._scaled is not None and root is self._scaled[0]:
            root = self._scaled[1]
        if getattr(root, "numel", None) is None or len(self._scalars) >= LIMIT:
            return
        with suppress(Exception):  # a tensor type of the user's, or a broken GPU
            if root.numel() == 1 and not in_graph_capture():  # there it has a value only when the graph is replayed
                self._scalars.append((perf_counter_ns(), _copy_of(root)))

    def per_step(self, steps: Steps, origin_ns: int) -> tuple[float, ...]:
        """The mean loss of each step, NaN where it had none, from clock origin `origin_ns`. Forgets the losses."""
        scalars, self._scalars = self._scalars, []
        sums, counts = np.zeros(len(steps)), np.zeros(len(steps))
        times = np.array([t - origin_ns for t, _ in scalars], dtype=np.int64)
        rows = np.searchsorted(steps.start_ns, times, side="right") - 1
        for row, t_ns, (_, loss) in zip(rows, times, scalars, strict=True):
            if row >= 0 and t_ns <= steps.end_ns[row]:
                sums[row] += _value(loss)
                counts[row] += 1
        with np.errstate(invalid="ignore"):
            return tuple((sums / np.where(counts == 0, np.nan, counts)).tolist())


def _copy_of(loss: Any) -> Any:
    """The loss without its graph; copied, at the cost of a kernel launch, only where its memory may be overwritten."""
    copy = loss.detach()
    return copy.clone() if loss.is_cuda and not _owns_memory(loss) else copy


def _owns_memory(loss: Any) -> bool:
    """Whether one of torch's own operators made it. The CUDA graph of a compiled module overwrites its results.

    Views of such results, and results of operators in place (`loss /= 4`), count as overwritten, too.
    """
    from torch.autograd.function import BackwardCFunction

    return loss._base is None and loss._version == 0 and not isinstance(loss.grad_fn, BackwardCFunction)


def _value(loss: Any) -> float:
    """NaN where it cannot be read: its memory was freed, or the GPU fails."""
    try:
        return float(loss)
    except RuntimeError:
        return math.nan


MOST_CALLS = 65_536  # the newest, two numbers each


class ModelInputs:
    """Counts the values in the inputs of DistributedDataParallel, else of the first module that learns.

    Only calls with gradients count.
    """

    def __init__(self) -> None:
        self._calls: deque[tuple[int, int]] = deque(maxlen=MOST_CALLS)
        self._first = ExitStack()  # the hooks of that module
        self._wrapped = False  # in DistributedDataParallel

    def count_first_model(self) -> None:
        """Find the first module called on this thread that learns, and count the inputs of its calls."""
        from torch import is_grad_enabled

        def find(module: Any) -> None:
            if is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                first = weakref.ref(module)
                self._first.close()
                self._first.enter_context(
                    before_calls(type(module), "forward", lambda a, k: self._add_call(first(), a, k))
                )

        self._first.enter_context(module_calls(find, get_ident()))

    def close(self) -> None:
        """Remove these hooks: the run is over, something is compiled, or DistributedDataParallel is used."""
        self._first.close()

    def called(self, args: Args, kwargs: KeywordArgs) -> None:
        """DistributedDataParallel is called with these arguments."""
        if not self._wrapped:
            self._wrapped = True
            self._first.close()
            self._calls.clear()
        self._count(args, kwargs)

    def _add_call(self, first: Any, args: Args, kwargs: KeywordArgs) -> None:
        if first is not None and args[:1] and args[0] is first:
            self._count(args, kwargs)

    def _count(self, args: Args, kwargs: KeywordArgs) -> None:
        from torch import is_grad_enabled

        if not is_grad_enabled():
            return
        try:
            parts = arrays_in([args[1:], kwargs])  # all values: the number of rows hides how long sequences are
            count = sum(int(part.numel()) for part in parts if hasattr(part, "numel"))
        except Exception:  # a tensor of the user's own kind may answer anything; their step goes on
            count = 0
        self._calls.append((perf_counter_ns(), count or -1))

    def values_of(self, steps: Steps, origin_ns: int) -> Int64:
        """The values in each step, from clock origin `origin_ns`; -1 where unknown, empty without any call."""
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
