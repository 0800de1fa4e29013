"""What a lesson's experiments measured, by their names: how much faster, and which value is enough, if that is decided.

By name, so that a guess or an answer written later is still held against the experiment it belongs to.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import permutations
from typing import ParamSpec, TypeVar

from msgspec import Struct

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.ranks import compare_ranks
from gpulab.api.experiment import code_of, conduct, experiment, experiments, main_names
from gpulab.api.runs_command import runs
from gpulab.errors import UsageError
from gpulab.formatting import factor, percent, plural, settings_words
from gpulab.knobs.catalogue import KNOBS
from gpulab.lessons.check import QUIETER, Checked, Note, is_unanswered, right, unanswered, undecided, wrong
from gpulab.options import is_quick
from gpulab.run import Run
from gpulab.thresholds import DEFAULT
from gpulab.tuning import cell_code as cells
from gpulab.tuning.compare.blocks import compare_runs, pair_ratios
from gpulab.tuning.compare.statistics import Estimate, paired, pairs_to_decide
from gpulab.tuning.compare.verdicts import unit_of, with_sample_counts
from gpulab.tuning.plan import Plan, arms_in
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.verdict import TOO_FEW, is_decided
from gpulab.views.comparison import Compared
from gpulab.views.comparison_sections import us
from gpulab.views.waiting import waiting

EACH_S = 15.0  # of a comparison among several
AGAIN, AGAIN_S = " again", 60.0  # the name and the time of what measures anew what an experiment left open
BLOCKS_SHARE = 0.7  # of that time; the rest is a run of the setting with its trace
MOST_PAIRS = 30  # as many as an experiment runs of itself
AS_GOOD = 0.15  # a time longer by no more than this fraction is as good as the shortest


Given = ParamSpec("Given")
Result = TypeVar("Result")


def experiment_named(name: str, *, again_too: bool = False) -> Experiment | None:
    """The latest of that name; None where none ran in this process. `again_too`: also one that repeats it."""
    names = (name, f"{name}{AGAIN}") if again_too else (name,)
    results = (one.result for one in reversed(experiments))
    return next((e for e in results if isinstance(e, Experiment) and e.name in names), None)


def run_named(name: str) -> Run | None:
    """The latest profiled run of that name of this process; None where none ran."""
    return next((run for run in reversed(runs.own) if run.settings.name == name), None)


class NotMeasured(Exception):
    """What a table or a figure shows has not been measured yet; the words say what to run."""


def notes(show: Callable[Given, Result]) -> Callable[Given, Result | Note]:
    """What a lesson shows, or a note in its place where it raises NotMeasured."""

    @wraps(show)
    def shown(*args: Given.args, **options: Given.kwargs) -> Result | Note:
        try:
            return show(*args, **options)
        except NotMeasured as e:
            return Note("Not measured.", str(e))

    return shown


def required_experiment(name: str) -> Experiment:
    """The latest of that name that compared something. Raises NotMeasured."""
    measured = experiment_named(name)
    if measured is None or not measured.comparisons:
        raise NotMeasured(f"There is no experiment {name!r} yet: run that cell first.")
    return measured


def required_run(name: str) -> Run:
    """The latest of that name. Raises NotMeasured."""
    run = run_named(name)
    if run is None:
        raise NotMeasured(f"There is no run {name!r} yet: run that cell first.")
    return run


def facts_named(name: str) -> Facts | None:
    """Of the same run."""
    run = run_named(name)
    return None if run is None else facts(run)


def ranks_named(name: str) -> list[Run]:
    """The runs of the latest job of that name, by rank; empty where none ran in ranks in this process."""
    latest = run_named(name)
    if latest is None or latest.job is None:
        return []
    same = {run.job.rank: run for run in runs.own if run.job is not None and run.job.id == latest.job.id}
    return [same[rank] for rank in sorted(same)]


def faster_than(before: str, after: str) -> Faster | None:
    """The speedup of the latest run of one name over that of another; None where that is not known.

    They ran one after the other, which is weaker evidence than blocks in turn.
    """
    first, second = run_named(before), run_named(after)
    if first is None or second is None:
        return None
    compared = compare_runs([first, second])
    return _faster(compared if isinstance(compared, Comparison) else None)


def data_wait_share(run: Run | None) -> float | None:
    """The share of a step, 0 to 1, that a run waited for data, as its report has it; None where it is not known."""
    shares = facts(run).shares if run is not None else None
    return None if shares is None else shares.share["data_wait"]


def communicating_share(run: Run | None) -> float | None:
    """The share of a step, 0 to 1, in which it exchanges data with other ranks, or waits for them, and computes
    nothing; None where it is not known.
    """
    figures = facts(run) if run is not None else None
    if figures is None or figures.breakdown is None or figures.shares is None:
        return None
    return figures.shares.of("communication")


def working_share(run: Run | None) -> float | None:
    """The share of a step, 0 to 1, in which the device works, as its report shows it; None where it is not known.

    On the CPU device: computing and updating weights.
    """
    figures = facts(run) if run is not None else None
    if figures is None or figures.breakdown is None or figures.shares is None:
        return None
    return (
        figures.shares.of("compute", "optimizer")
        if figures.breakdown.busy_fraction is None
        else 1 - figures.shares.idle
    )


def working_shares(name: str) -> dict[str, float]:
    """The same of every side of the experiment of that name, by its label; without what is not known."""
    measured = experiment_named(name)
    sides = measured.sides if measured is not None else ()
    shares = {side.label: working_share(side.facts.run) for side in sides if side.facts is not None}
    return {label: share for label, share in shares.items() if share is not None}


class Faster(Struct, frozen=True):
    """The speedup of a setting over the baseline; `sure`: whether that is more than chance gives."""

    times: float
    sure: bool
    interval: tuple[float, float] | None = None


def times_faster(name: str, knob: str = "", value: str = "") -> Faster | None:
    """Of the setting `knob=value` of the experiment of that name, else of its first; None where that is not known.

    Where that setting was measured again, because the experiment left it open, it is of then.
    """
    again, first = experiment_named(name, again_too=True), experiment_named(name)
    return _faster(_setting(again, knob, value) or _setting(first, knob, value))


def _setting(measured: Experiment | None, knob: str, value: str) -> Comparison | None:
    compared = measured.comparisons if measured is not None else ()
    return next((one for one in compared if not knob or one.b.settings.get(knob) == value), None)


def waiting_share(name: str, rank: int) -> float | None:
    """The share of its profiled steps that a rank of the latest job of that name waits for others; None: not known."""
    ranks = {run.job.rank: facts(run) for run in ranks_named(name) if run.job is not None}
    if not ranks:
        return None
    compared = compare_ranks(ranks, skew_notice=DEFAULT.skew_notice)
    mine = next((one for one in compared.ranks if one.rank == rank), None)
    return None if mine is None or mine.waiting_us is None else mine.waiting_us / mine.step_us


def _faster(compared: Comparison | None) -> Faster | None:
    if compared is None or compared.ratio is None:
        return None
    return Faster(1 / compared.ratio, is_decided(compared.verdict), compared.times_as_fast_interval)


class Again(Struct, frozen=True):
    """A setting that an experiment left open, and with how many pairs it would be decided."""

    name: str
    one: Comparison
    pairs: int

    @property
    def words(self) -> str:
        return (
            f"{plural(self.one.pairs, 'pair')} of blocks left {self.one.b.label} open; about {self.pairs} may decide "
            f"it. It is measured again, in at most {AGAIN_S:g} s. Stop ends it early."
        )

    def run(self) -> None:
        """Measure it again, and show the comparison."""
        assert self.one.a.facts is not None
        run = self.one.a.facts.run
        settings = tuple(f"{knob}={value}" for knob, value in self.one.b.settings.items())
        steps, name = max(block.step_count for block in self.one.a.blocks), f"{self.name}{AGAIN}"
        if run.job is not None:  # by the magic, which knows what the ranks need of the notebook
            words = [name, "--ab", ", ".join(settings), "--ranks", str(run.job.world_size)]
            line = shlex.join([*words, "--steps", str(steps), "--budget", f"{AGAIN_S:g}"])
            cells.shell().run_cell_magic("gpuprofile", line, run.code)
            return
        code = code_of(run.code, main_names())
        conduct(code, Plan(arms_in(code.variables, settings), block_steps=steps, budget_s=AGAIN_S, name=name))


def left_open(name: str, knob: str = "", value: str = "") -> Again | None:
    """What is worth measuring again, once, so that a guess gets its answer; None where nothing is."""
    measured = experiment_named(name, again_too=True)
    one = _setting(measured, knob, value)
    if one is None or measured is None or measured.name != name or is_quick():
        return None
    run = one.a.facts.run if one.a.facts is not None else None
    pairs = _pairs_within(one, AGAIN_S)
    in_a_cell = run is not None and run.source in ("cell", "statement")
    return Again(name, one, pairs) if pairs is not None and in_a_cell else None


def _pairs_within(one: Comparison, budget_s: float) -> int | None:
    """How many pairs would decide it, where they fit into the time; None where it is decided, or they do not."""
    blocks = [block for side in (one.a, one.b) for block in side.blocks if block.step_count]
    if one.verdict != "undecided" or one.ratio is None or one.evidence != "interleaved" or not blocks:
        return None
    pairs = pairs_to_decide(Estimate(one.ratio, one.interval, one.pairs), one.noise_floor)
    if pairs is None and one.pairs < TOO_FEW:  # so few tell nothing, how many it takes neither
        pairs = 2 * TOO_FEW
    blocks_s = sum(block.time_ns * (1 + block.dropped / block.step_count) for block in blocks) / 1e9
    if pairs is None or pairs > MOST_PAIRS or pairs * blocks_s / max(one.pairs, 1) > BLOCKS_SHARE * budget_s:
        return None
    return pairs


class Swept(Struct, frozen=True):
    """The time of a sample (of a step, where all batches are alike) by value, as the table of the sweep shows it.

    `longer` says between which factors the first value takes as long as the second, with 95 % certainty: from their
    blocks of the same turns, so that what disturbed both counts for neither.
    """

    times_us: dict[int, float]
    longer: dict[tuple[int, int], tuple[float, float]]

    @classmethod
    def of(cls, sweep: Experiment, knob: str, as_written: int) -> Swept:
        """Of a sweep of one knob over whole numbers; the cell has `as_written`. What failed is left out."""
        times: dict[int, float] = {}
        timed: dict[int, tuple[Side, tuple[float, float]]] = {}
        for side, compared in zip(sweep.sides, (None, *sweep.comparisons), strict=True):
            value = side.settings.get(knob, str(as_written) if compared is None else None)
            time_us = us(side, sweep)
            if value is not None and time_us and not side.failure:
                times[int(value)] = time_us
                timed[int(value)] = side, _around(time_us, compared)
        longer = {(v, u): _times_as_long(timed[u], timed[v]) for v, u in permutations(timed, 2)}
        return cls(dict(sorted(times.items())), longer)

    @property
    def best(self) -> int:
        """The value with the shortest time."""
        return min(self.times_us, key=lambda value: self.times_us[value])

    @property
    def enough(self) -> int:
        """The smallest that is as good as the fastest."""
        limit = (1 + AS_GOOD) * self.times_us[self.best]
        return min(value for value, time in self.times_us.items() if time <= limit)

    @property
    def may_be_enough(self) -> list[int]:
        """All that the blocks leave open: one value where the sweep decides it."""
        return [
            value
            for value in self.times_us
            if not self._surely_longer(value) and not any(self._surely_good(u) for u in self.times_us if u < value)
        ]

    def _surely_longer(self, value: int) -> bool:
        return value != self.best and self.longer[value, self.best][0] > 1 + AS_GOOD

    def _surely_good(self, value: int) -> bool:
        return all(self.longer[value, u][1] <= 1 + AS_GOOD for u in self.times_us if u != value)


def _times_as_long(a: tuple[Side, tuple[float, float]], b: tuple[Side, tuple[float, float]]) -> tuple[float, float]:
    """B against A by their blocks; without blocks, by where the time of each may lie against the baseline."""
    (side_a, (least_a, most_a)), (side_b, (least_b, most_b)) = a, b
    of_a, of_b, _ = with_sample_counts(side_a, side_b)
    unit, unfair = unit_of(of_a, of_b)
    estimate = None if unfair else paired(pair_ratios(of_a, of_b, unit))
    if estimate is not None:
        return estimate.interval or (0.0, math.inf)
    return least_b / most_a, most_b / least_a if least_a else math.inf


def _around(time_us: float, compared: Comparison | None) -> tuple[float, float]:
    """Nothing is certain of a time without an interval; the baseline is what all are measured by."""
    if compared is None:
        return time_us, time_us
    if compared.interval is None or not compared.ratio:
        return 0.0, math.inf
    low, high = compared.interval
    return time_us * low / compared.ratio, time_us * high / compared.ratio


def compare_each(
    code: Callable[[], object],
    settings: Iterable[Mapping[str, object]],
    steps: int,
    pairs: int,
    budget_s: float = EACH_S,
) -> None:
    """Compare each setting with the baseline `code`, in `budget_s` seconds each, and print the verdict; of fewer than
    `pairs` that decide nothing no factor, and of what cannot be compared here, why.
    """
    for setting in settings:
        named = settings_words(setting)
        try:
            with waiting(f"comparing {named}"):
                compared = experiment(code, setting, steps=steps, pairs=pairs, budget_s=budget_s, show=False)
                more = _pairs_within_of(compared)
                if more is not None:
                    compared = experiment(code, setting, steps=steps, pairs=more, budget_s=AGAIN_S, show=False)
        except UsageError as why:  # such as pin_memory without a GPU: there is nothing to measure
            print(f"{why}\n")
        else:
            print(f"{_verdict_on(named, compared, pairs)}\n")


def _pairs_within_of(compared: Compared) -> int | None:
    result = compared.result
    ran = isinstance(result, Experiment) and result.comparisons and not result.stopped and not is_quick()
    return _pairs_within(result.comparisons[0], AGAIN_S) if ran and isinstance(result, Experiment) else None


def _verdict_on(setting: str, compared: Compared, pairs: int) -> str:
    """Its headline; an undecided one of too few blocks has a factor that says nothing."""
    result = compared.result
    one = result.comparisons[0] if isinstance(result, Experiment) and result.comparisons else None
    if one is None or one.pairs >= pairs or one.b.failure or is_decided(one.verdict):
        return compared.headline.sentence
    return (
        f"Undecided: {setting}: only {one.pairs} of {plural(pairs, 'pair')} of blocks ran in the time, too few to "
        f"tell; compare_each(…, budget_s=60) gives it more. {QUIETER}"
    )


def check_enough(answer: object, name: str, knob: str, as_written: int) -> Checked:
    """Whether `answer` is the smallest value of the sweep of that name that is as good as its best."""
    measured = experiment_named(name)
    swept = Swept.of(measured, knob, as_written) if measured is not None else Swept({}, {})
    if len(swept.times_us) < 2:
        return unanswered(f"There is no sweep {name!r} of {knob} to judge it by: run that cell first.")
    cost = KNOBS[knob].cost
    tried = ", ".join(map(str, swept.times_us))
    if is_unanswered(answer):
        return unanswered(
            f"Put one of the values tried ({tried}) in place of the dots, then run that cell and this one again."
        )
    if isinstance(answer, str):
        return wrong(f"{answer!r} is a text: write the number without quotes.")
    if isinstance(answer, bool) or not isinstance(answer, int) or answer not in swept.times_us:
        return wrong(f"{answer!r} is not among the values tried: {tried}.")
    possible = swept.may_be_enough
    if answer in possible and len(possible) > 1:
        others = " or ".join(f"{knob}={value}" for value in possible if value != answer)
        return undecided(
            f"It may be {knob}={answer}, but also {others}: this measurement leaves both open. {QUIETER} Or run the "
            "sweep again with more pairs (--pairs 10). The lesson goes on without it, and this check can be run at any "
            "time."
        )
    if answer in possible:
        return right(f"{knob}={answer} is the smallest value within {percent(AS_GOOD)} of the fastest. {cost}")
    longer = swept.times_us[answer] / swept.times_us[swept.best]
    if answer < swept.enough:
        return wrong(f"{knob}={swept.best} gives a {factor(longer)}× speedup over {knob}={answer}. Go further.")
    return wrong(
        f"{knob}={swept.enough} is smaller and takes at most {percent(AS_GOOD)} longer than the fastest. {cost}"
    )
