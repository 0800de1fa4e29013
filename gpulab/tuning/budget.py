"""The time that an experiment may take: all that its user waits, with full runs, blocks, traces and restoring."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpulab.formatting import while_s
from gpulab.options import DEFAULT_BUDGET_S, FURTHER_BUDGET_S
from gpulab.tuning.plan import Plan

Clock = Callable[[], float]  # seconds, never backwards

MOST_TIMES = 5  # times the default: longer than this nobody waits who has not asked for it
FULL_RUNS_SHARE = 0.5  # of the budget, where blocks follow
LEAST_FULL_RUN_S = 1.0
ENDING_S, ENDING_SHARE = 2.0, 0.1  # at most
WATCHED_S = 0.25


def default_budget_s(plan: Plan) -> float:
    """Of a plan without a budget of its own: more settings take longer."""
    if not plan.interleaved:
        return math.inf
    return DEFAULT_BUDGET_S + FURTHER_BUDGET_S * max(0, len(plan.arms) - 1)


class Budget:
    """Counts from when it is made. One that was asked for is kept; without one gpulab takes what the least needs."""

    def __init__(self, plan: Plan, clock: Clock = time.monotonic) -> None:
        self.asked = plan.budget_s is not None
        self.limit_s = plan.budget_s if plan.budget_s is not None else default_budget_s(plan)
        self._most_s = self.limit_s if self.asked else MOST_TIMES * self.limit_s
        self._full_runs_s = self.limit_s * (FULL_RUNS_SHARE if plan.interleaved else 1.0)
        self._clock = clock
        self._began_s = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """For measuring: what the result then takes, to be worked out and shown, is kept."""
        return self.limit_s - min(ENDING_S, ENDING_SHARE * self.limit_s) - self.elapsed_s

    @property
    def over(self) -> bool:
        return self.left_s <= 0

    def full_run_s(self, runs_left: int) -> float:
        """How long the next of so many full runs may take."""
        return max(LEAST_FULL_RUN_S, (self._full_runs_s - self.elapsed_s) / max(1, runs_left))

    def extend_to(self, needed_s: float) -> bool:
        """Make room for what the least takes in all, where no budget was asked for. False where there is no room."""
        if not self.asked:
            self.limit_s = min(self._most_s, max(self.limit_s, needed_s + ENDING_S))
        return needed_s <= self.limit_s

    @property
    def words(self) -> str:
        """ "20 s"."""
        return while_s(self.limit_s)


@contextmanager
def watched(budget: Budget, stop: Callable[[], None]) -> Iterator[None]:
    """Inside, `stop` is called on a thread of its own when the budget is over, and again for what begins after that."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(WATCHED_S):
            if budget.over:
                stop()

    if math.isinf(budget.limit_s):
        yield
        return
    thread = threading.Thread(target=look, name="gpulab-budget", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
