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
    """What a climb may do. `without`: knobs to leave alone; `allow`: knobs that may change the training."""

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
    """One attempt: the settings on top of all kept ones, the reason, and the outcome.

    `back` are kept knobs that are tried at their baseline value again; `settings` then has these baseline values.
    `comparison` compares, interleaved, all kept settings (A) with the new ones on top (B); None if it was stopped
    before. `loss` is the loss verdict that decided; if seeds were run, it is against the baseline with its band.
    `words` say why the attempt was kept or not: a sentence without a full stop.
    """

    number: int
    settings: Mapping[str, str]
    finding: Finding | None  # None: proposed by a screening or by earlier attempts
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
    """The record of a whole climb.

    `baseline` is None if it did not run. `whole` compares it with all kept settings in interleaved blocks; None if no
    setting was kept or the climb ended before. `diagnosis` is of the cell at the end.
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
        """All kept settings, in the order of the climb; a later value of a knob replaces an earlier one."""
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
        """The cell with all kept settings: side B of the last kept attempt, else the baseline."""
        tops = [rung.comparison.b for rung in self.rungs if rung.kept and rung.comparison is not None]
        return tops[-1] if tops else self.baseline
