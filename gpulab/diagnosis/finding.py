"""What a rule has to say about a run: the cause, the evidence, the time it would give back, and the cure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpulab.analysis.source_lines import SourceLine
from gpulab.intervals import Intervals
from gpulab.prediction.prediction import Prediction

Confidence = Literal["measured", "likely", "possible"]
Level = Literal["good", "notice", "bad", "unknown"]

BETWEEN = "between_steps"  # a claim on time that the typical step does not hold: pauses, spread over all steps


class Evidence(Struct, frozen=True):
    """One figure that supports a finding, as a sentence without a full stop; `span` is where to look, by the clock."""

    words: str
    span: tuple[int, int] | None = None  # ns since the start of the run


class Finding(Struct, frozen=True):
    """One cause.

    `summary` is a sentence for a person who knows none of our words. `recoverable_us_per_step` is the most that its
    cure can give back, from the accounting; None where that cannot be told. `parts` are the parts of the step
    (`analysis.breakdown.PARTS`, or `BETWEEN`) whose time it explains: two findings that share one share its time. After
    a slash a part may name what within it is meant: two findings that claim "compute/matrix" have cures for the
    very same time, and only the larger counts. `settings` are the knobs that cure it (`{"workers": "2"}`), `cure` says
    it in words, also where no knob does it, `otherwise` what to do where the settings are predicted to bring nothing;
    empty: the same. `only_after` are keys of findings without whose cure this one's cannot
    help. `title` is what it is called where the title of its kind says more than was measured; empty: as its kind.
    `level` colours a headline. Filled by the ranking: `after` says what comes next once this one is
    cured, `shares_with` the keys of stronger findings that took a part of its time. `removed_ns` is when the time falls
    away that its cure removes, where no setting but an edit is the cure: [start, end) in ns by the run's clock.
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
    between_us_per_step: float = 0.0  # of the recoverable time, where it claims both a part of the step and `BETWEEN`
    removed_ns: tuple[tuple[int, int], ...] = ()
    once_us: float | None = None  # what it takes once, and in no step
    title: str = ""
    names_function: bool = False  # `source_line` is where a function begins: which of its lines is not known
    source: tuple[SourceLine, ...] = ()  # the lines around `source_line`, each with its share of the time in question

    @property
    def cost_us(self) -> float:
        """The recoverable time per step; 0 where that cannot be told."""
        return self.recoverable_us_per_step or 0.0

    @property
    def knob(self) -> str | None:
        """The cure as `--set` takes it ("workers=2"); None where no knob does it."""
        return ", ".join(f"{name}={value}" for name, value in self.settings) or None

    @property
    def predicted_ratio(self) -> float | None:
        """Predicted time per sample with the knob over today's; None where nothing or only a range is predicted."""
        return self.prediction.ratio if self.prediction is not None and not self.prediction.only_sign else None

    @property
    def predicted_interval(self) -> tuple[float, float] | None:
        """Where that ratio should lie; it aims at 95 %, and `%gpulab scoreboard` tells how often it held here."""
        return self.prediction.interval if self.prediction is not None else None


class Undetermined(Struct, frozen=True):
    """A rule cannot tell, because something was not recorded. `what` it would tell, `record` what to do next time."""

    key: str
    what: str
    record: str


class Diagnosis(Struct, frozen=True):
    """All that was found, the costliest first. `untold` are rules that could not tell, and what to record for them.

    `step_us` is the typical step; `total_us` is the time per step with all that the typical one does not hold (saving
    every hundredth step). The sum of `recoverable_us_per_step` is never more than `total_us`. `notes` is what a reader
    has to know of how it was made, each one sentence.
    """

    findings: tuple[Finding, ...]
    untold: tuple[Undetermined, ...] = ()
    step_us: float | None = None
    total_us: float | None = None
    whole_window: bool = False  # no step was found: "per step" is of the whole profiled time
    notes: tuple[str, ...] = ()
    alarm: str = ""  # what makes all findings doubtful, as a sentence beside the first of them
    ended: str = ""  # how the run ended before its code did, as a sentence before the first of them
    few_steps: int | None = None  # as `Facts.few_steps`: no share is told

    @property
    def first(self) -> Finding:
        """The one that the headline is about: there always is one, if only `healthy` or `cannot_tell`."""
        return self.findings[0]

    def of(self, key: str) -> Finding | None:
        """The finding of that key, or None."""
        return next((f for f in self.findings if f.key == key), None)


def pairs(times: Intervals) -> tuple[tuple[int, int], ...]:
    """Intervals as `Finding.removed_ns` keeps them."""
    return tuple((start, end) for start, end in times.tolist())
