"""Training loops played on a CPU whose clock the script sets: operators, lines of the user's, looks at the stack.

Times are microseconds here, nanoseconds in the record. However busy the machine, the figures are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace

from gpulab.run import Category, Memory, Phase, Place, Run, Samples, StackSamples, Steps
from tests.support import synthetic
from tests.support.timelines import MAIN, Span, steps_between, timeline

LOOK_US = 2_000.0  # from one look to the next


class HostLoop:
    """Plays one loop on one thread; every method is what the program does next."""

    def __init__(self, *places: Place) -> None:
        self.places = places
        self.now_us = 0.0
        self.steps_us: list[tuple[float, float]] = []
        self._spans: list[Span] = []
        self._lines: list[tuple[float, int]] = []  # until when the thread was at which of the places
        self._begun_us = 0.0

    def python(self, us: float, place: int) -> None:
        """Nothing that a trace shows, at this line."""
        self.now_us += us
        self._lines.append((self.now_us, place))

    def operator(self, name: str, us: float, place: int) -> None:
        """An operator that this line calls."""
        start_us = self.now_us
        self.python(us, place)
        self._add(name, Category.CPU_OP, start_us)

    @contextmanager
    def annotated(self, name: str) -> Iterator[None]:
        """What happens inside is part of that."""
        start_us = self.now_us
        yield
        self._add(name, Category.USER_ANNOTATION, start_us)

    def end_step(self) -> None:
        """One step is over."""
        self._add(f"ProfilerStep#{len(self.steps_us)}", Category.USER_ANNOTATION, self._begun_us)
        self.steps_us.append((self._begun_us, self.now_us))
        self._begun_us = self.now_us

    def run(self) -> Run:
        """The record: the played steps are the profiled ones, and as many of their median length came before."""
        at_us = np.arange(LOOK_US, self.now_us, LOOK_US)
        place = np.array([p for _, p in self._lines])[np.searchsorted([end for end, _ in self._lines], at_us)]
        stack = StackSamples((at_us * 1e3).astype(np.int64), place.astype(np.int32))
        count = len(self.steps_us)
        run = replace(
            synthetic.cpu_case().run,
            steps=self._steps(),
            timeline=timeline(self._spans),
            traced_numbers=tuple(range(count, 2 * count)),
            stack=stack,
            places=self.places,
            loader=None,
            missing=(),
            pauses=(),
            samples=Samples(),
            memory=Memory(),
        )
        run.check()
        return run

    def _steps(self) -> Steps:
        traced = np.array(self.steps_us)
        usual_us = float(np.median(traced[:, 1] - traced[:, 0]))
        count = len(traced)
        before = np.arange(-count, 0)[:, None] * usual_us + [0.0, usual_us]
        bounds_ns = np.concatenate((before, traced)) * 1e3
        phase = [Phase.MEASURED] * count + [Phase.TRACED] * count
        return steps_between(*bounds_ns.T, sample_count=-1, phase=phase)

    def _add(self, name: str, category: Category, start_us: float) -> None:
        start_ns, end_ns = round(start_us * 1e3), round(self.now_us * 1e3)
        self._spans.append(Span(name, category, MAIN, start_ns, end_ns - start_ns))


def played(step: Callable[[HostLoop], None], *places: Place, steps: int = 5) -> HostLoop:
    """Plays `step(loop)` that often."""
    loop = HostLoop(*places)
    for _ in range(steps):
        step(loop)
        loop.end_step()
    return loop
