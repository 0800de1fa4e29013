"""The loss of each step of an unmodified loop: where its backward passes begin, read when the run is over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter_ns
from typing import Any

import numpy as np

from gpulab.capture.hooks import losses_heard
from gpulab.devices.gpus import in_graph_capture
from gpulab.run import Steps

LIMIT = 10_000  # losses kept; on a GPU each holds a block of 512 bytes


class Losses:
    """Scalars from which backward passes began. Reading them waits for the device, so that comes last."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, Any]] = []
        self._scaled: tuple[Any, Any] | None = None  # what GradScaler.scale last gave, and from what

    @contextmanager
    def heard(self) -> Iterator[Losses]:
        """Hear the backward passes of this thread. Entered last: knobs that scale the loss come after us."""
        try:
            with losses_heard(self._hear, self._scale):
                yield self
        finally:
            self._scaled = None

    def _scale(self, scaled: Any, loss: Any) -> None:
        self._scaled = scaled, loss

    def _hear(self, root: Any) -> None:
        """Keep this loss. A fault of ours must not become one of the user's backward pass."""
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
