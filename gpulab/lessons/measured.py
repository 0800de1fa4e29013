"""The measurements of a lesson's cells, by name: a speedup, a share of a step, and the sufficient value of a sweep.

Names ensure that a later guess or answer is still compared with the experiment it belongs to.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from itertools import permutations
from typing import ParamSpec, TypeVar

from msgspec import Struct

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.ranks import compare_ranks
from gpulab.api.experiment import code_of, conduct, experiment, experiments, main_names
from gpulab.api.runs import runs
from gpulab.errors import UsageError
from gpulab.formatting import factor, percent, plural, settings_words
from gpulab.knobs.catalogue import KNOBS
from gpulab.lessons.check import QUIETER, Checked, Note, NotMeasured, right, undecided, wrong
from gpulab.options import is_quick
from gpulab.run import Run
from gpulab.thresholds import DEFAULT
from gpulab.tuning import cell_code as cells
from gpulab.tuning.compare.blocks import compare_runs, pair_ratios
from gpulab.tuning.compare.statistics import Estimate, paired, pairs_to_decide
from gpulab.tuning.compare.verdicts import unit_of, with_sample_counts
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.tuning.schedule import Plan, arms_in
from gpulab.verdict import TOO_FEW, is_decided
from gpulab.views.comparison import Compared
from gpulab.views.comparison_sections import us
from gpulab.views.waiting import waiting

EACH_S = 15.0  # for each of several comparisons
AGAIN, AGAIN_S = " again", 60.0  # name suffix and time of a repeated measurement
BLOCKS_SHARE = 0.7  # of that time; the rest is a traced run of the setting
MOST_PAIRS = 30  # as many as an experiment runs by default
ONE_OF_THE_SWEEP = "Put one of the values tried in place of the dots, then run that cell and this one again."
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "conv2d")
AS_GOOD = 0.15  # a time longer by at most this fraction is as good as the shortest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def notes(show: Callable[Parameters, Result]) -> Callable[Parameters, Result | Note]:
    """Makes a function show a note in place of its result if it raises NotMeasured."""

    @wraps(show)
    def result_or_note(*args: Parameters.args, **options: Parameters.kwargs) -> Result | Note:
        try:
            return show(*args, **options)
        except NotMeasured as e:
            return Note("Not measured.", str(e))

    return result_or_note


def latest_experiment(name: str, *aliases: str) -> Experiment:
    """The latest experiment among these names that compared anything. Raises NotMeasured if none ran in this
    process.
    """
    results = (one.result for one in reversed(experiments))
    latest = next((e for e in results if isinstance(e, Experiment) and e.name in (name, *aliases)), None)
    if latest is None or not latest.comparisons:
        raise NotMeasured(f"There is no experiment {name!r} yet: run that cell first.")
    return latest


def latest_run(name: str) -> Run:
    """The latest profiled run of that name. Raises NotMeasured if none ran in this process."""
    latest = next((run for run in reversed(runs.own) if run.settings.name == name), None)
    if latest is None:
        raise NotMeasured(f"There is no run {name!r} yet: run that cell first.")
    return latest


def latest_facts(name: str) -> Facts:
    """The figures of `latest_run(name)`. Raises NotMeasured."""
    return facts(latest_run(name))


def latest_ranks(name: str) -> list[Run]:
    """The runs of the latest job of that name, by rank. Raises NotMeasured if none ran in ranks in this process."""
    job = latest_run(name).job
    if job is None:
        raise NotMeasured(f"The run {name!r} was not run in ranks: run its cell again.")
    same = {run.job.rank: run for run in runs.own if run.job is not None and run.job.id == job.id}
    return [same[rank] for rank in sorted(same)]


# -- shares of a step --------------------------------------------------------------------------------------------------


def data_wait_share(figures: Facts) -> float | None:
    """The share of a step, 0 to 1, that a run waited for data, as in its report; None if unknown."""
    return None if figures.shares is None else figures.shares.share["data_wait"]


def communicating_share(figures: Facts) -> float | None:
    """The share of a step, 0 to 1, in which a rank exchanges data or waits for other ranks without computing; None if
    unknown.
    """
    traced = figures.breakdown is not None and figures.shares is not None
    return figures.shares.of("communication") if traced and figures.shares is not None else None


def working_share(figures: Facts | None) -> float | None:
    """The share of a step, 0 to 1, in which the device works, as in its report; None if unknown.

    For the CPU device: computing and updating weights.
    """
    if figures is None or figures.breakdown is None or figures.shares is None:
        return None
    shares, on_cpu = figures.shares, figures.breakdown.busy_fraction is None
    return shares.of("compute", "optimizer") if on_cpu else 1 - shares.idle


def working_shares(name: str) -> dict[str, float]:
    """The working share of every side of the experiment of that name, by label, without unknown shares."""
    shares = {side.label: working_share(side.facts) for side in latest_experiment(name).sides}
    return {label: share for label, share in shares.items() if share is not None}


def product_share(figures: Facts | None) -> float | None:
    """The share of the profiled steps, 0 to 1, that goes to matrix products and convolutions; None: not measured."""
    if figures is None or not figures.operators:
        return None
    rows = [row for row in figures.operators if _is_product(row.name)]
    if figures.trace is None:
        return math.fsum(row.share for row in rows)
    step_us = figures.traced_step_us
    return None if step_us is None else min(1.0, sum(row.device_us or 0.0 for row in rows) / step_us.median)


def _is_product(operator: str) -> bool:
    name = re.sub("^aten::_*(mkldnn_|cudnn_|thnn_|slow_)?|(_forward|_backward)$", "", operator)
    return name in PRODUCTS


def waiting_share(name: str, rank: int) -> float | None:
    """The share of its profiled steps that a rank of the latest job of that name waits for others; None: unknown."""
    ranks = {run.job.rank: facts(run) for run in latest_ranks(name) if run.job is not None}
    compared = compare_ranks(ranks, skew_notice=DEFAULT.skew_notice).ranks
    return next((r.waiting_us / r.step_us for r in compared if r.rank == rank and r.waiting_us is not None), None)


# -- speedups ----------------------------------------------------------------------------------------------------------


class Faster(Struct, frozen=True):
    """The speedup of a setting over the baseline; `sure`: whether it exceeds chance."""

    times: float
    sure: bool
    interval: tuple[float, float] | None = None

    @classmethod
    def of(cls, compared: object) -> Faster:
        """The speedup in a result. Raises NotMeasured if it is not a comparison, or one that failed."""
        if not isinstance(compared, Comparison) or compared.ratio is None:
            raise NotMeasured("This could not be compared: run its cell again.")
        return cls(1 / compared.ratio, is_decided(compared.verdict), compared.times_as_fast_interval)


def times_faster(name: str, knob: str = "", value: str = "") -> Faster:
    """The speedup of `knob=value` in the experiment of that name, or else of its first setting. Raises NotMeasured.

    If the experiment left the setting undecided and it was measured again, the new measurement counts.
    """
    again, first = latest_experiment(name, f"{name}{AGAIN}"), latest_experiment(name)
    return Faster.of(_setting(again, knob, value) or _setting(first, knob, value))


def faster_than(before: str, after: str) -> Faster:
    """The speedup of the latest run named `after` over the latest run named `before`. Raises NotMeasured.

    The runs were sequential, which is weaker evidence than interleaved blocks.
    """
    return Faster.of(compare_runs([latest_run(before), latest_run(after)]))


def _setting(measured: Experiment, knob: str, value: str) -> Comparison | None:
    return next((one for one in measured.comparisons if not knob or one.b.settings.get(knob) == value), None)


class Remeasurement(Struct, frozen=True):
    """A setting that an experiment left undecided, and the number of pairs that would decide it."""

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
        if run.job is not None:  # by the magic, which knows what ranks need from the notebook
            words = [name, "--ab", ", ".join(settings), "--ranks", str(run.job.world_size)]
            line = shlex.join([*words, "--steps", str(steps), "--budget", f"{AGAIN_S:g}"])
            cells.shell().run_cell_magic("gpuprofile", line, run.code)
            return
        code = code_of(run.code, main_names())
        conduct(code, Plan(arms_in(code.variables, settings), block_steps=steps, budget_s=AGAIN_S, name=name))


def remeasurement(name: str, knob: str = "", value: str = "") -> Remeasurement | None:
    """The setting to measure again so that a guess can be answered; None if it is decided or hopeless."""
    if is_quick():
        return None
    try:
        measured = latest_experiment(name, f"{name}{AGAIN}")
    except NotMeasured:
        return None
    one = _setting(measured, knob, value)
    if one is None or measured.name != name or one.a.facts is None:
        return None
    pairs = _pairs_within(one, AGAIN_S)
    in_a_cell = one.a.facts.run.source in ("cell", "statement")
    return Remeasurement(name, one, pairs) if pairs is not None and in_a_cell else None


def _pairs_within(one: Comparison, budget_s: float) -> int | None:
    """How many pairs would decide a setting; None if it is decided, or the pairs do not fit into the time."""
    blocks = [block for side in (one.a, one.b) for block in side.blocks if block.step_count]
    if one.verdict != "undecided" or one.ratio is None or one.evidence != "interleaved" or not blocks:
        return None
    pairs = pairs_to_decide(Estimate(one.ratio, one.interval, one.pairs), one.noise_floor)
    if pairs is None and one.pairs < TOO_FEW:  # so few pairs show nothing, not even how many are needed
        pairs = 2 * TOO_FEW
    blocks_s = sum(block.time_ns * (1 + block.dropped / block.step_count) for block in blocks) / 1e9
    if pairs is None or pairs > MOST_PAIRS or pairs * blocks_s / max(one.pairs, 1) > BLOCKS_SHARE * budget_s:
        return None
    return pairs


# -- a sweep -----------------------------------------------------------------------------------------------------------


class Swept(Struct, frozen=True):
    """The time of a sample (of a step, if all batches are equal) by value, as in the table of the sweep.

    `longer` has the 95 % interval of the first value's time over the second's, from their blocks of the same rounds, so
    that common disturbances cancel.
    """

    times_us: dict[int, float]
    longer: dict[tuple[int, int], tuple[float, float]]

    @classmethod
    def of(cls, sweep: Experiment, knob: str, as_written: int) -> Swept:
        """The times of a sweep of one knob over whole numbers; the cell has `as_written`. Failed values are left
        out.
        """
        sides: dict[int, Side] = {}
        for side in sweep.sides:
            value = side.settings.get(knob, str(as_written) if side is sweep.sides[0] else None)
            if value is not None and us(side, sweep) and not side.failure:
                sides[int(value)] = side
        times_us = {value: us(side, sweep) or 0.0 for value, side in sorted(sides.items())}
        return cls(times_us, {(v, u): _times_as_long(sides[u], sides[v]) for v, u in permutations(sides, 2)})

    @property
    def best(self) -> int:
        """The value with the shortest time."""
        return min(self.times_us, key=lambda value: self.times_us[value])

    @property
    def enough(self) -> int:
        """The smallest value that is as good as the fastest."""
        limit = (1 + AS_GOOD) * self.times_us[self.best]
        return min(value for value, time in self.times_us.items() if time <= limit)

    @property
    def may_be_enough(self) -> list[int]:
        """The values that may be the smallest sufficient one: a single value if the sweep decides."""
        possible = []
        for value in self.times_us:  # the smallest first
            others = [u for u in self.times_us if u != value]
            if value == self.best or self.longer[value, self.best][0] <= 1 + AS_GOOD:
                possible.append(value)
            if all(self.longer[value, u][1] <= 1 + AS_GOOD for u in others):  # as good: no larger value is needed
                break
        return possible


def _times_as_long(a: Side, b: Side) -> tuple[float, float]:
    """The interval of B over A by their blocks; unbounded if these are too few or not comparable."""
    a, b, _ = with_sample_counts(a, b)
    unit, why_unfair = unit_of(a, b)
    estimate = None if why_unfair else paired(pair_ratios(a, b, unit))
    return (estimate.interval if estimate is not None else None) or (0.0, math.inf)


def check_enough(answer: object, name: str, knob: str, as_written: int) -> Checked:
    """Whether `answer` is the smallest value of the sweep of that name that is as good as its best.

    Raises NotMeasured.
    """
    swept = Swept.of(latest_experiment(name), knob, as_written)
    if len(swept.times_us) < 2:
        raise NotMeasured(f"There is no sweep {name!r} of {knob} to judge it by: run that cell first.")
    values = ", ".join(map(str, swept.times_us))
    if isinstance(answer, str):
        return wrong(f"{answer!r} is a text: write the number without quotes.")
    if isinstance(answer, bool) or not isinstance(answer, int) or answer not in swept.times_us:
        return wrong(f"{answer!r} is not among the values tried: {values}.")
    possible, cost = swept.may_be_enough, KNOBS[knob].cost
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


# -- several comparisons in a row --------------------------------------------------------------------------------------


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
        words = settings_words(setting)
        try:
            with waiting(f"comparing {words}"):
                compared = experiment(code, setting, steps=steps, pairs=pairs, budget_s=budget_s, show=False)
                one, result = next(iter(compared.comparisons), None), compared.result
                stopped = is_quick() or not isinstance(result, Experiment) or result.stopped
                if one is not None and not stopped and (more := _pairs_within(one, AGAIN_S)):
                    compared = experiment(code, setting, steps=steps, pairs=more, budget_s=AGAIN_S, show=False)
        except UsageError as why:  # e.g. pin_memory without a GPU: nothing to measure
            print(f"{why}\n")
        else:
            print(f"{_verdict_on(words, compared, pairs)}\n")


def _verdict_on(setting: str, compared: Compared, pairs: int) -> str:
    """The headline of a setting; without the factor if too few blocks left it undecided."""
    one = next(iter(compared.comparisons), None)
    if one is None or one.pairs >= pairs or one.b.failure or is_decided(one.verdict):
        return compared.headline.sentence
    return (
        f"Undecided: {setting}: only {one.pairs} of {plural(pairs, 'pair')} of blocks ran in the time, too few to "
        f"tell; compare_each(…, budget_s=60) gives it more. {QUIETER}"
    )
