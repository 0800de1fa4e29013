"""The plan of an experiment: its arms, the length and order of its blocks, and its time budget."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.steps import select
from gpulab.errors import UsageError
from gpulab.formatting import settings_words, while_s
from gpulab.knobs.catalogue import KNOBS, grid, parse_settings, parse_sweeps
from gpulab.knobs.knob import setting_text
from gpulab.knobs.variables import Plain, Variables
from gpulab.options import (
    DEFAULT_BUDGET_S,
    FURTHER_BUDGET_S,
    QUICK_PAIRS,
    QUICK_STEPS,
    ROW_BUDGET_S,
    at_most,
    check_seconds,
    check_whole_number,
    is_quick,
)
from gpulab.run import Loader, Run, StepFlag, Steps
from gpulab.tuning.record import BASELINE

if TYPE_CHECKING:
    Settings = Mapping[str, Plain]
else:
    Settings = Mapping[str, Any]  # for a plan that is read from a file


class Arm(Struct, frozen=True):
    """One setting of the knobs; no setting at all is the baseline."""

    settings: Settings = field(default_factory=dict)

    @property
    def label(self) -> str:
        return settings_words(self.texts) or BASELINE

    @property
    def texts(self) -> dict[str, str]:
        return {k: setting_text(v) if k in KNOBS else str(v) for k, v in self.settings.items()}


def check_plan(plan: Plan) -> None:
    """Raise UsageError, naming the option, for bounds that cannot work."""
    for option, value, least in (("steps", plan.block_steps, 1), ("pairs", plan.pairs, 1), ("seeds", plan.seeds, 0)):
        check_whole_number(f"--{option}", value, least)
    if plan.budget_s is not None:
        check_seconds("--budget", plan.budget_s)
    if not plan.arms:
        raise UsageError("There is nothing to compare: name a setting, for example --ab workers=4.")


def arms_in(variables: Variables, settings: Sequence[str], sweeps: Sequence[str] = ()) -> tuple[Arm, ...]:
    """The arms that `--ab`, `--set` and `--sweep` describe for code with these variables.

    Raises UsageError for a name or a value that the code cannot have.
    """
    fixed = parse_settings(settings, variables.has, variables.names)
    return tuple(map(Arm, grid(parse_sweeps(sweeps, variables.has, variables.names), fixed)))


class Plan(Struct, frozen=True):
    """The arms apart from the baseline, and bounds; if a bound is None, gpulab chooses and says so."""

    arms: tuple[Arm, ...]
    base: Arm = field(default_factory=Arm)  # the arms are compared with it; default: the baseline
    block_steps: int | None = None  # counted steps of a block
    pairs: int | None = None
    budget_s: float | None = None  # total time that the user waits
    full_run_s: float | None = None  # of a run with its trace, after its first step
    seeds: int = 0  # runs of A with other seeds, for the band of the loss
    interleaved: bool = True  # False: one run of each arm, no blocks (`--set`)
    early: bool = False  # a turn of blocks before the full run of each arm, to show figures as soon as possible
    screening: bool = False  # only blocks, no full run of each arm; the slower half drops out repeatedly
    name: str = ""
    device: str = "auto"
    trace: bool = True
    save: bool = True

    @property
    def bounded(self) -> Plan:
        """The same plan; in quick mode with the fewest pairs and steps that still compare."""
        if not is_quick():
            return self
        plan = replace(self, seeds=min(self.seeds, 1))
        if not self.interleaved:
            return plan
        return replace(plan, pairs=at_most(self.pairs, QUICK_PAIRS), block_steps=at_most(self.block_steps, QUICK_STEPS))

    def run_name(self, arm: Arm) -> str:
        """The name of an arm's run in lists: "workers=2,4: baseline", "workers=2"."""
        if self.name:
            return f"{self.name}: {arm.label}"
        pairs = dict.fromkeys(pair for other in self.arms for pair in other.texts.items())
        values = {name: ",".join(value for n, value in pairs if n == name) for name, _ in pairs}
        settings = settings_words(values)
        return arm.label if arm.settings or not settings else f"{settings}: {arm.label}"


class Progress(Struct, frozen=True):
    """The progress of an experiment. `rest_s` is None while it is unknown."""

    what: str  # "baseline: step 12 of 40", "workers=2", "block 7 of 40: workers=2"
    done: float
    total: int
    rest_s: float | None
    in_blocks: bool = False  # whether the traced runs are over and blocks run
    elapsed_s: float | None = None  # since the experiment began
    about_s: float | None = None  # expected total time
    most_s: float | None = None  # total time after which it ends with the results so far
    note: str = ""  # a sentence about the time


Listener = Callable[[Progress], None]


WARMUP = 3  # steps; definitions.md, "Honest comparison" 1: with workers also the steps fed from the buffer
STEPS = (5, 10)  # that count in a block; definitions.md, "Honest comparison" 3
LEAST_BLOCK_S = 0.2  # a block of very short steps gets more of them, or a single hiccup dominates it
MOST_STEPS = 200
PAIRS = (10, 30)
SHORTEST_FULL_RUN, FULL_RUN = 13, 40  # steps: enough for a profiled window, and the usual number
STARTING_S = 2.0  # of a full run, apart from its steps: the meters, the profiler, reading the trace
RESTORING_S = 0.02  # before a block
SCREENING_TURNS, SCREENED = 2, 3  # turns until the slower half drops out; how many stay to the end
FEWEST_TURNS = 4  # unless a budget ends it sooner; definitions.md, "Honest comparison" 3


class Size(Struct, frozen=True):
    """The length of a block in steps: dropped warm-up steps, then counted steps."""

    warmup: int
    steps: int

    @property
    def total(self) -> int:
        return self.warmup + self.steps


def block_size(
    runs: Sequence[Run], steps: int | None = None, rounds: Sequence[int] = (), loaders: Sequence[Loader] = ()
) -> Size:
    """The size that suits all arms, from a run of each arm, or the loader of an arm that did not run.

    `steps`: counted steps. `rounds`: periods in steps (accumulation); a block counts whole periods.

    Workers deliver batches in rounds, one batch per worker: a block counts whole rounds. A cell that ends by itself
    after fewer steps has shorter blocks, with at least as many counted steps as dropped ones. If batches read ahead
    would fall into the counted steps, all steps count, because the first steps waited for these batches.
    """
    longest_s = max(step_s(run) for run in runs)
    loaders = [*loaders, *(run.loader for run in runs if run.loader is not None)]
    workers = [loader.num_workers for loader in loaders if loader.num_workers]
    buffered = max(map(_buffered, loaders), default=0)
    warmup = max(WARMUP, buffered)
    if steps is None:
        steps = _rounded_up(_least_steps(longest_s), math.lcm(*workers, *rounds))
    warmup = _rounded_up(warmup, math.lcm(*rounds))
    available = min((len(run.steps) for run in runs if run.outcome == "completed"), default=warmup + steps)
    if warmup + steps > available:
        warmup = 0 if buffered > available // 2 else min(warmup, available // 2)
        steps = max(1, available - warmup)
    return Size(warmup, steps)


def _rounded_up(count: int, whole: int) -> int:
    return math.ceil(count / whole) * whole


def pairs_within(budget_s: float, turn_s: float, pairs: int | None = None) -> int:
    """The number of turns: `pairs` if given, else as many as fit, at least four."""
    if pairs is not None:
        return pairs
    return max(FEWEST_TURNS, min(PAIRS[1], int(budget_s / max(turn_s, 1e-6))))


def turn_s(runs: Sequence[Run], size: Size) -> float:
    """The estimated time of a turn, from one run of each arm; the first arm runs twice in a turn."""
    steps_s = [step_s(run) for run in runs]
    return size.total * (sum(steps_s) + steps_s[0])


def expected(one_s: float, arms: int, pairs: int | None = None) -> tuple[float, float]:
    """The time of a whole experiment in s: the least, and the expected.

    `one_s`: the step of an earlier run; `arms`: their number without the baseline. All arms are assumed equally fast.
    """
    turn = (arms + 2) * ((WARMUP + _least_steps(one_s)) * one_s + RESTORING_S)
    shortest, full = (STARTING_S + steps * one_s for steps in (SHORTEST_FULL_RUN, FULL_RUN))
    turns = (FEWEST_TURNS, PAIRS[1]) if pairs is None else (pairs, pairs)
    return ((arms + 1) * shortest + turns[0] * turn, (arms + 1) * full + turns[1] * turn)


def turn_order(arm_count: int, random_order: random.Random, *, early: bool = False) -> list[int]:
    """One turn in random order: A twice, for A against A, every other arm once; `early`: the second A comes last."""
    order = [0, *range(arm_count)][early:]
    random_order.shuffle(order)
    return [*order, 0] if early else order


def block_rows(steps: Steps, size: Size) -> np.ndarray:
    """Rows of a block's counted steps: after its warm-up, complete, and without a compilation."""
    flags = steps.flags
    fit = ((flags & StepFlag.PARTIAL) == 0) & ((flags & StepFlag.COMPILE) == 0)
    rows = np.flatnonzero(fit)
    return rows[rows >= size.warmup][: size.steps]


def _least_steps(one_s: float) -> int:
    least = STEPS[1] if one_s < 0.2 else STEPS[0]
    return max(least, min(MOST_STEPS, math.ceil(LEAST_BLOCK_S / one_s)))


def step_s(run: Run) -> float:
    """The mean counted step, in s."""
    rows = select(run).rows
    wall_ns = run.steps.time_ns[rows] if len(rows) else run.steps.time_ns
    return max(1e-6, float(np.mean(wall_ns)) / 1e9) if len(wall_ns) else 1.0


def _buffered(loader: Loader) -> int:
    if not loader.num_workers:
        return 0
    return loader.num_workers * (loader.prefetch_factor or 2) + 2


Clock = Callable[[], float]  # seconds, never backwards

MOST_TIMES = 5  # times the default: gpulab never extends a budget beyond this
FULL_RUNS_SHARE = 0.5  # of the budget, if blocks follow
LEAST_FULL_RUN_S = 1.0
ENDING_S, ENDING_SHARE = 2.0, 0.1  # reserved for the end: at most 2 s, and this share of the budget
EVERY_S = 0.5


def default_budget_s(plan: Plan) -> float:
    """The budget of a plan that names none: more settings get more time."""
    if not plan.interleaved:
        return math.inf
    return (ROW_BUDGET_S if plan.early else DEFAULT_BUDGET_S) + FURTHER_BUDGET_S * max(0, len(plan.arms) - 1)


class Budget:
    """The time budget, from its creation on. A user's budget is fixed; a default grows to fit the fewest turns."""

    def __init__(self, plan: Plan, clock: Clock = time.monotonic) -> None:
        self.is_fixed = plan.budget_s is not None
        self.limit_s = plan.budget_s if plan.budget_s is not None else default_budget_s(plan)
        self._most_s = self.limit_s if self.is_fixed else MOST_TIMES * self.limit_s
        self._full_runs_s = self.limit_s * (FULL_RUNS_SHARE if plan.interleaved else 1.0)
        self._pairs = plan.pairs
        self.needed_s: float | None = None  # least total time
        self.expected_s: float | None = None  # expected total time
        self._clock = clock
        self._began_s = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    @property
    def rest_s(self) -> float:
        """The rest for measuring: the end of the budget is reserved for computing and showing the result."""
        return self.limit_s - min(ENDING_S, ENDING_SHARE * self.limit_s) - self.elapsed_s

    @property
    def over(self) -> bool:
        return self.rest_s <= 0

    def full_run_s(self, runs: int) -> float:
        """The time limit of each of `runs` full runs still to come."""
        return max(LEAST_FULL_RUN_S, (self._full_runs_s - self.elapsed_s) / max(1, runs))

    def expect(self, needed_s: float) -> None:
        """Extend the budget to the time of the fewest turns, unless the user named one."""
        self.needed_s = needed_s
        if not self.is_fixed:
            self.limit_s = min(self._most_s, max(self.limit_s, needed_s + ENDING_S))

    @property
    def too_short(self) -> str:
        """A sentence if the fewest turns do not fit; else empty."""
        if self.needed_s is None or self.needed_s <= self.limit_s:
            return ""
        return f"The budget of {self.words} is short: the minimum takes about {while_s(self.needed_s)}."

    def timed(self, progress: Progress) -> Progress:
        """The progress with elapsed and expected time; `about_s` only if the number of pairs is fixed."""
        return replace(
            progress,
            elapsed_s=self.elapsed_s,
            about_s=None if self.expected_s is None or self._pairs is None else min(self.expected_s, self.limit_s),
            most_s=None if math.isinf(self.limit_s) else self.limit_s,
            note=self.too_short,
        )

    @property
    def words(self) -> str:
        """ "20 s"."""
        return while_s(self.limit_s)


@contextmanager
def repeated(task: Callable[[], None]) -> Iterator[None]:
    """Calls `task` every half second on a separate thread."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(EVERY_S):
            task()

    thread = threading.Thread(target=repeat, name="gpulab-budget", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
