"""The record of comparisons: sides, blocks, speeds and other differences between two settings. All plain data.

Follows definitions.md, "Honest comparison": paired blocks, the median of their ratios, a percentile bootstrap over
blocks, a verdict only beyond 2 % and the run-to-run noise of the session, otherwise "undecided".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, field

from gpulab.analysis.facts import Facts
from gpulab.knobs.observation import StepInputs
from gpulab.prediction.prediction import Prediction
from gpulab.run import Change
from gpulab.tuning.compare.statistics import Estimate, pairs_to_decide
from gpulab.verdict import Verdict, verdict

Evidence = Literal["interleaved", "sequential"]
Unit = Literal["sample", "step"]
Interval = tuple[float, float]
LossVerdict = Literal[
    "same", "within the band", "outside the band", "different", "seeds not run", "not comparable", "not measurable"
]
BASELINE = "baseline"  # the label of a side without settings: the cell as it is
NO_EFFECT = "no effect: "  # prefix of a side's failure if its knobs did nothing in its run


class Block(Struct, frozen=True):
    """One short run of the code: its counted steps. In each `turn`, every arm ran once or twice."""

    arm: int  # 0 is A, the baseline
    turn: int
    order: int  # over the whole experiment
    step_count: int  # counted, warm-up not included
    dropped: int  # warm-up steps before them
    sample_count: int | None  # None: unknown
    time_ns: int  # of the counted steps
    losses: tuple[float, ...] = ()  # of all its steps, dropped ones too; NaN for a step without a loss
    setup_ns: int | None = None  # before the counted steps, less the dropped steps at the counted steps' pace
    own_fraction: float | None = None  # of its time without the training thread's waits for a core; None: unknown


class Side(Struct, frozen=True):
    """One side of a comparison. `settings` as shown ("workers=2"); empty for the baseline."""

    label: str
    settings: dict[str, str]
    facts: Facts | None  # of its traced run; None if that could not run (out of memory)
    blocks: tuple[Block, ...] = ()
    us_per_step: float | None = None
    us_per_sample: float | None = None
    checks: tuple[Change, ...] = ()
    losses: tuple[float, ...] = ()  # per step of its traced run, from the same start; NaN for a step without a loss
    seed_losses: tuple[tuple[float, ...], ...] = ()  # A only: of further runs with other seeds
    failure: str = ""  # why it could not be run: "out of memory at 3.1 GiB"
    edit: str = ""  # what makes it permanent: a diff of the cell, or a snippet
    edit_is_diff: bool = False
    edit_cell: str = ""  # the cell with that edit
    step_inputs: StepInputs | None = None  # shapes of the model's inputs in a step; None: not certain
    prediction: Prediction | None = None  # of its ratio, made before it ran; None: not requested
    setup_ns: int | None = None  # of its traced run; as `Block.setup_ns`


class PartChange(Struct, frozen=True):
    """One part of both sides' time, in us per step and, if samples are known, per sample."""

    name: str
    label: str
    a_us: float
    b_us: float
    grew: bool | None  # None: within the spread of the traced steps
    a_us_per_sample: float | None = None  # None: samples unknown
    b_us_per_sample: float | None = None


class LossComparison(Struct, frozen=True):
    """Loss per step of both sides, from the same start; the band spans runs of A that differ in their seed only."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    band: tuple[tuple[float, float], ...] = ()  # lowest and highest per step
    seeds: int = 0
    verdict: LossVerdict = "not measurable"
    words: str = ""

    @property
    def moved(self) -> bool:
        """Whether a reader has to check the losses before keeping the setting."""
        return self.verdict not in ("same", "within the band", "not measurable")


class Speed(Struct, frozen=True):
    """B against A. `ratio` is the time per `unit` of B over A: below 1 is faster; None if it is not known."""

    verdict: Verdict
    ratio: float | None = None
    interval: Interval | None = None  # 95 %
    noise_floor: float | None = None  # as a fraction: 0.05 is up to 1.05 times as long or short; None: not measured
    pairs: int = 0  # of blocks in turn
    unit: Unit = field(default="step", name="per")
    setup_s: float | None = None  # one-time cost of B over A, before its steps; None: not measured
    is_running: bool = False  # more pairs come

    @property
    def times_as_fast(self) -> float | None:
        """How many times as fast B is, as shown in all texts."""
        return 1 / self.ratio if self.ratio else None

    @property
    def times_as_fast_interval(self) -> Interval | None:
        """The 95 % interval of `times_as_fast`."""
        return inverse(self.interval)

    @property
    def said(self) -> str:
        """The verdict in words; "so far" while it is open."""
        so_far = self.interval is None or (self.is_running and self.verdict == "undecided")
        return "so far" if so_far else self.verdict

    @property
    def pairs_to_decide(self) -> int | None:
        """About how many pairs would decide it; None: it is decided, or needs a quieter machine."""
        if self.said != "undecided" or self.ratio is None:
            return None
        return pairs_to_decide(Estimate(self.ratio, self.interval, self.pairs), self.noise_floor)

    @property
    def inverse(self) -> Speed:
        """The speed of A against B."""
        if self.ratio is None:
            return self
        other_way: dict[Verdict, Verdict] = {"faster": "slower", "slower": "faster"}
        said = other_way.get(self.verdict, self.verdict)
        setup_s = -self.setup_s if self.setup_s is not None else None
        ratio, interval = 1 / self.ratio, inverse(self.interval)
        return Speed(said, ratio, interval, self.noise_floor, self.pairs, self.unit, setup_s)

    def after(self, first: Speed | None) -> Speed:
        """This speed on top of another that was measured separately; `first` None means a ratio of 1."""
        if first is None:
            return self
        if first.ratio is None or self.ratio is None or first.unit != self.unit:
            return Speed("not comparable")
        ratio, interval = product((first, self))
        floor, pairs = max(first.noise_floor or 0.0, self.noise_floor or 0.0), min(first.pairs, self.pairs)
        setup_s = first.setup_s + self.setup_s if first.setup_s is not None and self.setup_s is not None else None
        return Speed(verdict(ratio, interval, floor, pairs), ratio, interval, floor, pairs, self.unit, setup_s)


def inverse(interval: Interval | None) -> Interval | None:
    """The interval of the inverse ratio."""
    return None if interval is None else (1 / interval[1], 1 / interval[0])


def product(speeds: Sequence[Speed]) -> tuple[float, Interval | None]:
    """The product of ratios measured separately: in logarithms, the half widths of their intervals add in squares."""
    factors = [(speed.ratio, speed.interval) for speed in speeds if speed.ratio and speed.interval]
    ratio = math.prod(speed.ratio or 1.0 for speed in speeds)
    if len(factors) < len(speeds):
        return ratio, None
    low, high = (math.hypot(*(math.log(interval[end] / middle) for middle, interval in factors)) for end in (0, 1))
    return ratio, (ratio * math.exp(-low), ratio * math.exp(high))


class Comparison(Speed, frozen=True, kw_only=True):
    """B against A: the speed, and everything else that was compared."""

    a: Side
    b: Side
    evidence: Evidence
    parts: tuple[PartChange, ...] = ()
    no_parts_reason: str = ""  # why there are no parts although both sides have a breakdown
    loss: LossComparison | None = None
    differences: tuple[str, ...] = ()  # of machine, versions, code, state: shown at the top
    notes: tuple[str, ...] = ()
    restored: str = ""  # what was put back between blocks, or why not
    ended_early: str = ""  # "Stopped after 3 pairs of blocks"; empty: it ran to its end

    @property
    def speed(self) -> Speed:
        """The speed alone."""
        return Speed(*(getattr(self, name) for name in Speed.__struct_fields__))


class Experiment(Struct, frozen=True):
    """All arms of an A/B, a sweep or a grid. `comparisons[i]` is arm i + 1 against A."""

    sides: tuple[Side, ...]
    comparisons: tuple[Comparison, ...]
    seconds: float
    stopped: bool = False
    name: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)
