"""A short run of a cell for a comparison: its steps and losses, and nothing else; no meters, no profiler, no record."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from time import perf_counter_ns
from types import TracebackType
from typing import Self

from gpulab.capture import hooks
from gpulab.capture.loop import Loop, stop_behind
from gpulab.capture.window import Window
from gpulab.run import Settings, Steps


class ShortRun:
    """Counts the steps of the code of a `with` block and ends it after `step_limit` of them.

    `settle_after` steps the GPU is waited for, and again at the end: `settled_ns` is the time between. Afterwards
    `steps` are all steps; other exceptions than our own end of the run pass.
    """

    def __init__(self, step_limit: int, code: str = "", settle_after: int | None = None) -> None:
        self._settings = Settings(steps=step_limit, trace=False, live=False, save=False)
        self._code = code
        self._settle_after = settle_after
        self._undo = ExitStack()
        self.origin_ns = 0
        self.steps = Steps.empty()
        self.settled_ns: int | None = None

    def __enter__(self) -> Self:
        self.origin_ns = perf_counter_ns()
        self._loop = Loop(self, self._settings, self._code, _no_window, self.origin_ns, None)
        if self._settle_after is not None and "torch" in sys.modules:
            self._loop.settle_at = (self._settle_after, self._settings.steps or 0)
        self._loop.begin(hooks.install(self._loop, self._undo))
        return self

    def stop(self) -> None:
        """End at the next step boundary. From any thread."""
        self._loop.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._undo.close()
        self.steps = self._loop.finish(perf_counter_ns() - self.origin_ns, "")
        if len(self._loop.settled_ns) == 2:
            self.settled_ns = self._loop.settled_ns[1] - self._loop.settled_ns[0]
        stop = stop_behind(error)
        return stop is not None and stop.capture is self


def _no_window() -> Window:
    raise AssertionError("a short run is never traced")


__all__ = ["ShortRun"]
