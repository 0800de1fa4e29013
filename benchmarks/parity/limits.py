"""How long each part of the bench may take, and with how many compute threads: one record, passed between processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

LONGER = 4  # times as long as its limit a search may take, where blocks are so long that fewer pairs would tell nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. A search is to end within six minutes, a climb within the five that a user would wait."""

    alone_s: float = 120.0  # every value of every knob by itself
    compiled_s: float = 60.0  # the same of compiling, whose blocks would take the others' time
    together_s: float = 110.0  # combinations of those that helped
    completing_s: float = 40.0  # what else there is, on top of the best so far: twice at most
    confirming_s: float = 60.0  # the best three once more: those that chose them flatter them
    climb_s: float = 300.0
    judgement_s: float = 90.0
    threads: int | None = None  # of the baseline; None: as many as cores, as torch would have it

    @property
    def search_s(self) -> float:
        """Of all its parts at most."""
        return self.alone_s + self.together_s + self.compiled_s + 2 * self.completing_s + self.confirming_s

    def times(self, factor: float) -> Limits:
        """Each of them times `factor`: to see whether all parts work."""
        return Limits(**{n: factor * v if n.endswith("_s") else v for n, v in asdict(self).items()})
