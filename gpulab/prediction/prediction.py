"""What a change would bring, as a figure with its doubt: made before the change is run, and held against it after.

And what it may rest on beyond the run itself: earlier predictions held against the truth, short runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

TO_TRY = "try it: "  # how the reason begins where no figures tell, and a run would


class Prediction(Struct, frozen=True):
    """Of one setting of the knobs.

    `ratio` is the predicted time per sample (per step where the samples stay the same) over today's, `interval` the
    range it should lie in with 95 %; both None where `refused` says why nothing is predicted. `only_sign`: the
    range is all that the evidence carries, its middle is no estimate. `memory_ratio` likewise of the peak of the
    GPU's memory, without a range; None: not predicted. `memory_basis` says from what it is or that there is none;
    empty where no GPU computes. `setup_s` is taken once, before the steps; None: not predicted. `basis` is one
    sentence: from which figures and which formula.
    """

    settings: dict[str, str]
    ratio: float | None
    interval: tuple[float, float] | None
    basis: str
    memory_ratio: float | None = None
    only_sign: bool = False
    refused: str = ""
    memory_basis: str = ""
    setup_s: float | None = None

    @property
    def needs_run(self) -> bool:
        """Whether it is refused because only a run tells."""
        return self.refused.startswith(TO_TRY)

    @property
    def reason(self) -> str:
        """Why it is refused, in words; empty where it is not."""
        return self.refused.removeprefix(TO_TRY)


class PriorEvidence(Struct, frozen=True):
    """What earlier runs on this machine say beyond the run itself.

    `errors`: of each knob, measured over predicted ratio of the predictions that were held against a measurement on
    this machine. `sizes`: median step (µs) and peak memory (bytes; None unknown) by batch size, from short runs.
    `values_before`: the value of each name as the code has it, where that was seen.
    """

    errors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    sizes: Mapping[int, tuple[float, int | None]] = field(default_factory=dict)
    values_before: Mapping[str, str] = field(default_factory=dict)


NOTHING = PriorEvidence()
