"""What a change would bring, as a figure with its doubt: made before the change is run, and held against it after."""

from __future__ import annotations

from msgspec import Struct

TO_TRY = "try it: "  # how the reason begins where no figures tell, and a run would


class Prediction(Struct, frozen=True):
    """Of one setting of the knobs.

    `ratio` is the predicted time per sample (per step where the samples stay the same) over today's, `interval` the
    range it should lie in with 95 %; both None where `refused` says why nothing is predicted. `only_sign`: the range
    is all that the evidence carries, its middle is no estimate. `memory_ratio` likewise of the peak of the GPU's
    memory, without a range; None: not predicted. `memory_basis` says from what it is or that there is none; empty where
    no GPU computes. `basis` is one sentence: from which figures and which formula.
    """

    settings: dict[str, str]
    ratio: float | None
    interval: tuple[float, float] | None
    basis: str
    memory_ratio: float | None = None
    only_sign: bool = False
    refused: str = ""
    memory_basis: str = ""

    @property
    def needs_run(self) -> bool:
        """Whether it is refused because only a run tells."""
        return self.refused.startswith(TO_TRY)

    @property
    def reason(self) -> str:
        """Why it is refused, in words; empty where it is not."""
        return self.refused.removeprefix(TO_TRY)
