"""The loss of each step of an unmodified loop: where its backward passes begin, read when the run is over."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import numpy as np

from gpulab.knobs.patching import replaced
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
        import torch
        from torch.amp import GradScaler

        thread = get_ident()

        def wrap_backward(original: Any) -> Any:
            @functools.wraps(original)
            def backward(*args: Any, **kwargs: Any) -> Any:
                if get_ident() == thread:
                    self._hear(args[0] if args else kwargs.get("tensors"))
                return original(*args, **kwargs)

            return backward

        def wrap_scale(original: Any) -> Any:
            @functools.wraps(original)
            def scale(scaler: Any, outputs: Any) -> Any:
                scaled = original(scaler, outputs)
                if get_ident() == thread:
                    self._scaled = (scaled, outputs)
                return scaled

            return scale

        try:
            with replaced(torch.autograd, "backward", wrap_backward), replaced(GradScaler, "scale", wrap_scale):
                yield self
        finally:
            self._scaled = None

    def _hear(self, root: Any) -> None:
        if self._scaled is not None and root is self._scaled[0]:
            root = self._scaled[1]
        if getattr(root, "numel", None) is not None and root.numel() == 1 and len(self._seen) < LIMIT:
            self._seen.append((perf_counter_ns(), root.detach()))

    def per_step(self, steps: Steps, origin_ns: int) -> tuple[float, ...]:
        """The mean loss of each step, NaN where it had none. `origin_ns`: 0 of the steps' clock. Forgets them."""
        seen, self._seen = self._seen, []
        sums, counts = np.zeros(len(steps)), np.zeros(len(steps))
        times = np.array([t - origin_ns for t, _ in seen], dtype=np.int64)
        rows = np.searchsorted(steps.start_ns, times, side="right") - 1
        for row, t_ns, (_, loss) in zip(rows, times, seen, strict=True):
            if row >= 0 and t_ns <= steps.end_ns[row]:
                sums[row] += float(loss)
                counts[row] += 1
        with np.errstate(invalid="ignore"):
            return tuple((sums / np.where(counts == 0, np.nan, counts)).tolist())


__all__ = ["Losses"]
