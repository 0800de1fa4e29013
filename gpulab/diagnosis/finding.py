"""The types of a diagnosis: a finding and its evidence, the figures that a rule reads, a kind of finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.facts import Facts
from gpulab.analysis.kernels import DeviceWork
from gpulab.analysis.source_lines import SourceLine, line_of, sees_python
from gpulab.analysis.step_shares import StepShares
from gpulab.formatting import capitalized, duration
from gpulab.intervals import Intervals
from gpulab.prediction.prediction import Prediction, Removal
from gpulab.run import Loader, Run
from gpulab.thresholds import Thresholds

Confidence = Literal["measured", "likely", "possible"]
Level = Literal["good", "notice", "bad", "unknown"]

BETWEEN = "between_steps"  # a claim on time outside the typical step: pauses, spread over all steps


class Evidence(Struct, frozen=True):
    """One figure that supports a finding, as a sentence without a full stop; `span` is the time at which to look."""

    words: str
    span: tuple[int, int] | None = None  # ns since the start of the run


def evidence(*words: str) -> tuple[Evidence, ...]:
    """Evidence without a `span`, one per text; empty texts are skipped."""
    return tuple(Evidence(each) for each in words if each)


class Finding(Struct, frozen=True):
    """One cause.

    `summary` is a sentence for a reader who does not know gpulab's terms. `recoverable_us_per_step` is the most time
    that the cure can save, from the accounting; None if unknown. `parts` are the parts of the step
    (`analysis.breakdown.PARTS`, or `BETWEEN`) whose time the finding explains: two findings with a common part share
    its time. A part may name a piece after a slash: two findings that claim "compute/matrix" have cures for the same
    time, and only the larger counts. `settings` are the knobs that cure it (`{"workers": "2"}`). `cure` is the cure in
    words, also if no knob exists. `otherwise` is the cure if the settings are predicted to gain nothing; empty: same as
    `cure`. `only_after` are keys of findings that must be cured first, or this cure cannot help. `title` replaces the
    title of the kind if that title claims more than was measured. `level` colours a headline. The ranking fills in
    `after`, the next finding once this one is cured, and `shares_with`, the keys of stronger findings that claimed a
    part of its time. `removed_ns` is the time that an edit of the code would remove, if no setting is the cure: [start,
    end) in ns by the run's clock.
    """

    key: str
    summary: str
    evidence: tuple[Evidence, ...]
    recoverable_us_per_step: float | None
    confidence: Confidence
    parts: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    cure: str = ""
    otherwise: str = ""
    lesson: str = ""
    source_line: str = ""
    prediction: Prediction | None = None
    after: str = ""
    level: Level = "notice"
    only_after: tuple[str, ...] = ()
    shares_with: tuple[str, ...] = ()
    between_us_per_step: float = 0.0  # part of the recoverable time in `BETWEEN`, if others are in the step
    removed_ns: tuple[tuple[int, int], ...] = ()
    once_us: float | None = None  # one-time cost, outside all steps
    title: str = ""
    memory: str = ""  # what it costs in memory, if that is its price, not time
    names_function: bool = False  # `source_line` is where a function begins: its costly line is unknown
    source: tuple[SourceLine, ...] = ()  # the lines around `source_line`, with their shares of the time

    @property
    def cost_us(self) -> float:
        """The recoverable time per step, in µs; 0 if unknown."""
        return self.recoverable_us_per_step or 0.0

    @property
    def knob(self) -> str | None:
        """The cure as an argument of `--set` ("workers=2"); None if no knob is the cure."""
        return ", ".join(f"{name}={value}" for name, value in self.settings) or None

    @property
    def predicted_ratio(self) -> float | None:
        """Predicted time per sample with the knob over the current time; None if unknown or only a range."""
        return self.prediction.ratio if self.prediction is not None and not self.prediction.only_sign else None

    @property
    def predicted_interval(self) -> tuple[float, float] | None:
        """The nominal 95 % interval of the ratio; `%gpulab scoreboard` shows how often such intervals held here."""
        return self.prediction.interval if self.prediction is not None else None


class Undetermined(Struct, frozen=True):
    """A rule cannot answer because something was not recorded. `what`: the question; `record`: what to record."""

    key: str
    what: str
    record: str


class Diagnosis(Struct, frozen=True):
    """All findings, the costliest first. `untold` are the questions that rules could not answer, and what to record to
    answer them.

    `step_us` is the typical step; `total_us` adds what happens in rare steps (saving every hundredth step), per step.
    The sum of `recoverable_us_per_step` is never more than `total_us`. `notes` are sentences on how the diagnosis was
    made.
    """

    findings: tuple[Finding, ...]
    untold: tuple[Undetermined, ...] = ()
    step_us: float | None = None
    total_us: float | None = None
    whole_window: bool = False  # no step was found: "per step" means the whole profiled time
    notes: tuple[str, ...] = ()
    alarm: str = ""  # what makes all findings doubtful, as a sentence next to the first
    ended: str = ""  # how the run ended early, as a sentence before the first finding
    few_steps: int | None = None  # as `Facts.few_steps`: no shares are shown

    @property
    def first(self) -> Finding:
        """The finding of the headline: always exists, if only as `healthy` or `cannot_tell`."""
        return self.findings[0]

    def of(self, key: str) -> Finding | None:
        """The finding with that key, or None."""
        return next((f for f in self.findings if f.key == key), None)


def pairs(times: Intervals) -> tuple[tuple[int, int], ...]:
    """Intervals in the form of `Finding.removed_ns`."""
    return tuple((start, end) for start, end in times.tolist())


def longest(times: Intervals) -> tuple[int, int] | None:
    """The longest of the intervals, where to look first; None without intervals."""
    return max(pairs(times), key=lambda span: span[1] - span[0], default=None)


FEWEST_STEPS = 6  # ours: warm-up, one step that counts, the profiled steps and their neighbours
_MOST = 0.5  # ours: a cause of half of the idle time is its main cause


class RuleContext(Struct, frozen=True):
    """The figures of one run that rules read, and the thresholds.

    `own`: shares of the time in which the process had its cores, if other programs take them; all rules use these.
    """

    facts: Facts
    thresholds: Thresholds
    own: StepShares | None = None

    @property
    def run(self) -> Run:
        """The run itself."""
        return self.facts.run

    @property
    def loader(self) -> Loader | None:
        """The DataLoader's settings, as far as they are known."""
        return self.facts.run.loader

    @property
    def breakdown(self) -> Breakdown | None:
        """The accounting of the traced steps."""
        return self.facts.breakdown

    @property
    def work(self) -> DeviceWork | None:
        """The GPU's work in the traced steps, row by row; None on a CPU."""
        return self.facts.work if self.on_gpu else None

    @property
    def step_us(self) -> float:
        """The typical step in µs: untraced if possible, else traced; a trace without steps is one step. 0: unknown."""
        step, account = self.facts.typical_step_us, self.breakdown
        if step is not None:
            return step.median
        return (account.mean_step_us or 0.0) if account is not None else 0.0

    @property
    def whole_us(self) -> float:
        """Mean time per step including the time between steps (`Facts.whole_us`); at least `step_us`."""
        return max(self.facts.whole_us or 0.0, self.step_us)

    def share(self, *parts: str) -> float:
        """The total share of these parts in the typical step, or in `own`; 0 without an accounting."""
        shares = self.own or self.facts.shares
        return 0.0 if self.breakdown is None or shares is None else shares.of(*parts)

    def part_us(self, *parts: str) -> float:
        """The total of these parts in µs of the typical step."""
        return self.share(*parts) * self.step_us

    def of_typical(self, profiled_share: float, *parts: str) -> float:
        """Convert a share of the profiled steps, spent within these parts, into a share of the typical step.

        The parts may have a different share in the typical step; the result never exceeds it.
        """
        account = self.breakdown
        part_share = 0.0 if account is None else sum(account.share[part] for part in parts)
        return self.share(*parts) * min(1.0, profiled_share / part_share) if part_share > 0 else profiled_share

    @property
    def on_gpu(self) -> bool:
        """Whether the accounted device is a GPU."""
        return self.run.device.kind == "cuda"

    @property
    def idle(self) -> float | None:
        """Share of the typical step in which the GPU is idle; None on a CPU or without an accounting."""
        account, shares = self.breakdown, self.own or self.facts.shares
        return None if account is None or account.busy_fraction is None or shares is None else shares.idle

    @property
    def idle_us(self) -> float:
        """The idle time in µs; 0 if unknown."""
        return (self.idle or 0.0) * self.step_us

    @property
    def loop_waits(self) -> float:
        """Share of the step in which the loop waits for data and the GPU idles. For a damaged trace: the whole wait."""
        waited = self.facts.data_wait_fraction
        if self.withheld("idle_causes") is None or waited is None:
            return self.share("data_wait")
        return min(1.0, waited)

    @property
    def starves(self) -> bool:
        """Whether waiting for data covers most of the idle time: then more work per step cannot help the GPU."""
        return self.loop_waits >= max(self.thresholds.data_wait_notice, _MOST * (self.idle or 0.0))

    @property
    def host_memory_full(self) -> bool:
        """Whether the machine's memory is nearly full: then no cure may need more memory."""
        rss, host = self.run.memory.peak_rss_bytes, self.run.environment.memory_total_bytes
        return bool(rss and host and rss / host >= self.thresholds.memory_full)

    @property
    def too_few_steps(self) -> bool:
        """Whether no step ran without the profiler, and the few steps are warm-up, which is not representative."""
        own = self.run.source != "trace" and len(self.run.steps) > 0
        return own and self.facts.step_us is None and len(self.run.steps) < FEWEST_STEPS

    @property
    def is_cut_short(self) -> bool:
        """Whether the trace file is cut short: its content supports no conclusion."""
        return self.run.origin is not None and self.run.origin.is_cut_short

    @property
    def names_no_cause(self) -> bool:
        """Whether the recording is not representative or incomplete: then a verdict says so, and no cause is named."""
        return self.too_few_steps or self.is_cut_short or self.run.device.kind == "unknown"

    @property
    def by_step(self) -> bool:
        """Whether steps were found; else the traced time counts as one step."""
        return self.breakdown is None or not self.breakdown.whole_window

    @property
    def unit(self) -> str:
        """The total that shares refer to, in words: "each step", or "the traced time" if no step was found."""
        return "each step" if self.by_step else "the traced time"

    @property
    def whole(self) -> str:
        """The total that times refer to: "each 9.20 ms step", or "9.20 ms traced" if no step was found."""
        step = duration(self.step_us)
        return f"each {step} step" if self.by_step else f"{step} traced"

    def withheld(self, figure: str) -> str | None:
        """Why the trace does not support the figure, as a sentence; None if it does, or without a trace."""
        reason = self.facts.integrity.reason(figure) if self.facts.integrity is not None else None
        return None if reason is None else capitalized(reason)

    def undetermined(self, key: str, what: str, *figures: str) -> Undetermined | None:
        """The question that the rule cannot answer, as the trace does not support one of these figures; else None."""
        why = next(filter(None, map(self.withheld, figures)), None)
        return None if why is None else Undetermined(key, what, f"{why}; record the trace again")

    def line_at(self, times: Intervals) -> str:
        """The user's line that runs at most of these times; empty if no line surely does."""
        place = line_of(self.run, times)
        return "" if place is None else str(place)

    def python_line_at(self, times: Intervals) -> str:
        """The same for times in which Python itself may work; empty if its stack could not be sampled during them."""
        return self.line_at(times) if sees_python(self.run) else ""


Rule = Callable[[RuleContext], Finding | Undetermined | None]
Role = Literal["cause", "context", "all is well", "open question", "end of the run"]


class FindingKind(Struct, frozen=True):
    """What all findings with one key have in common.

    `title` is a few plain words, as a title and within a sentence. `rule` returns findings of this kind; None if only
    all ranks of a job together show it. `lesson` is the notebook about it; a rule may set it for only some of its
    findings. `removal` is what an edit of the code removes, if no knob is the cure. The knobs themselves declare which
    kinds they cure (`helps_against`).

    `explains` are keys of symptoms: they are dropped if a finding of this kind has a time, because that time is the
    cause's time. `second_round`: the rule runs again as if the first finding were cured, because its limit is far above
    the silence. `of_job`: it concerns all ranks of a job, not one rank. `is_bound`: its time is what faster kernels
    would save, by the bytes that they would not move. `beside_headline`: its summary stands beside another headline: it
    costs no time now and ends the work later. A `role` of "context" is not a cause, but shown with each cause;
    "all is well" and "open question" are verdicts, for runs without a cause; the "end of the run" leads in any case.
    """

    key: str
    title: str
    rule: Rule | None = None
    lesson: str = ""
    removal: Removal | None = None
    explains: tuple[str, ...] = ()
    second_round: bool = False
    of_job: bool = False
    is_bound: bool = False
    role: Role = "cause"
    beside_headline: bool = False

    @property
    def is_verdict(self) -> bool:
        """Whether the kind judges the run as a whole and names no cause."""
        return self.role in ("all is well", "open question")
