"""A short run of a cell for a comparison: its steps and losses, and nothing else; no meters, no profiler, no record."""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter_ns
from types import TracebackType
from typing import Self

from gpulab.capture.pilot import Pilot, stop_behind
from gpulab.capture.steps.profiler_window import Window
from gpulab.run import Settings, Steps


class ShortRun:
    """Counts the steps of the code of a `with` block and ends it after `step_limit` of them.

    `on_gpu`: its steps are timed there, too, and the GPU is waited for at the end. Afterwards `steps` are all steps;
    other exceptions than our own end of the run pass.
    """

    def __init__(self, step_limit: int, code: str = "", *, on_gpu: bool = False) -> None:
        self._settings = Settings(steps=step_limit, trace=False, live=False, save=False)
        self._code = code
        self._on_gpu = on_gpu
        self._undo = ExitStack()
        self.origin_ns = 0
        self.steps = Steps.empty()
        self.fault: Exception | None = None  # of ours: the steps are not all

    def __enter__(self) -> Self:
        self.origin_ns = perf_counter_ns()
        self._pilot = Pilot(self, self._settings, self._code, _no_window, self.origin_ns, on_gpu=self._on_gpu)
        self._pilot.install(self._undo)
        self._pilot.begin()
        return self

    @property
    def step_count(self) -> int:
        """Steps so far. From any thread."""
        return self._pilot.step_count

    @property
    def beside_steps(self) -> str:
        return self._pilot.beside_steps

    def stop(self) -> None:
        """End at the next step boundary. From any thread."""
        self._pilot.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        end_ns = perf_counter_ns() - self.origin_ns
        self._pilot.ends(end_ns)
        self._undo.close()
        self.fault = self._pilot.fault
        self.steps = self._pilot.finish(end_ns, "")
        stop = stop_behind(error)
        return stop is not None and stop.capture is self


def _no_window() -> Window:
    raise AssertionError("a short run is never traced")
