"""The record of a climb: its bounds, its attempts with their outcomes, and the final comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct, field

from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.formatting import settings_words
from gpulab.options import CLIMB_BUDGET_S, CLIMB_SEEDS
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.record import Comparison, LossComparison, Side

Outcome = Literal[
    "kept",
    "no gain",
    "unsure",
    "slower",
    "no effect",
    "loss moved",
    "loss broken",
    "memory",
    "failed",
    "not comparable",
    "stopped",
]
Ending = Literal["nothing left", "budget", "rungs", "stopped", "error"]


class Bounds(Struct, frozen=True):
    """What a climb may do. `without` are knobs to leave alone, `allow` those that may change the training."""

    budget_s: float = CLIMB_BUDGET_S  # for the whole climb
    rungs: int | None = None  # settings to try; None: as many as the time allows
    seeds: int = CLIMB_SEEDS
    steps: int | None = None  # counted steps of a block; None: gpulab chooses
    pairs: int | None = None  # pairs of blocks of each comparison; None: gpulab chooses
    without: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()
    name: str = "climb"
    device: str = "auto"
    save: bool = True


class Skip(Struct, frozen=True):
    """A setting that was not tried, and why: a sentence without a full stop."""

    label: str
    why: str


class Attempt(Struct, frozen=True):
    """One attempt: the settings on top of all that was kept before, the reason, and the outcome.

    `back` are knobs that were kept and are tried at the baseline again; `settings` then has their values there.
    `comparison` is the interleaved one of all kept settings (A) with the new ones on top (B); None where it was stopped
    before. `loss` is the verdict that decided: against the baseline with its band, where seeds were run.
    `words` say why it was kept or not: a sentence without a full stop.
    """

    number: int
    settings: Mapping[str, str]
    finding: Finding | None  # None: no finding proposes it, earlier blocks of it looked faster
    prediction: Prediction | None
    outcome: Outcome
    words: str
    comparison: Comparison | None = None
    loss: LossComparison | None = None
    seconds: float = 0.0
    back: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return self.outcome == "kept"

    @property
    def label(self) -> str:
        """As in `--ab`: "workers=2"."""
        return settings_words(self.settings) + " again" * bool(self.back)


class Climb(Struct, frozen=True):
    """The whole climb.

    `baseline` is None where that did not run. `whole` compares it with all settings that were kept, in blocks in turn;
    None where none was or the climb ended before. `diagnosis` is that of the cell at the end.
    """

    baseline: Side | None
    rungs: tuple[Attempt, ...]
    ended: Ending
    seconds: float
    whole: Comparison | None = None
    diagnosis: Diagnosis | None = None
    skips: tuple[Skip, ...] = ()
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def kept(self) -> dict[str, str]:
        """All settings that were kept, in the order of the climb; a later value of a knob in place of an earlier."""
        settings: dict[str, str] = {}
        for rung in self.rungs:
            if rung.kept:
                for name, value in rung.settings.items():
                    settings.pop(name, None)
                    if name not in rung.back:
                        settings[name] = value
        return settings

    @property
    def top(self) -> Side | None:
        """The cell with all that was kept: the last kept attempt's, else the baseline."""
        tops = [rung.comparison.b for rung in self.rungs if rung.kept and rung.comparison is not None]
        return tops[-1] if tops else self.baseline
