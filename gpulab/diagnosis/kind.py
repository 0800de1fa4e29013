"""What is declared of a kind of finding beside its rule: its title, its lesson, and how it ranks among others."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpulab.diagnosis.context import Rule
from gpulab.prediction.removal import Pauses, Waits

Role = Literal["cause", "all is well", "open question"]


class FindingKind(Struct, frozen=True):
    """One key, and all that is said of it by name.

    `title` is a few plain words, as a title and within a sentence. `rule` returns findings of this kind; None where
    only all ranks of a job together show it. `lesson` is the notebook about it; a rule may name one for some of its
    findings only. `removal` is what falls away where an edit of the code, and no knob, is the cure. Which knobs help
    against it is known to the knobs (`helps_against`).

    `explains` are keys of symptoms: they go where a finding of this kind has a time, for that time is this cause's.
    `asked_again` once the first finding is thought away: its limit is far above the silence. `of_job`: it concerns all
    ranks of a job, not one alone. A `role` other than "cause" is a verdict: it speaks where no cause does.
    """

    key: str
    title: str
    rule: Rule | None = None
    lesson: str = ""
    removal: Pauses | Waits | None = None
    explains: tuple[str, ...] = ()
    asked_again: bool = False
    of_job: bool = False
    role: Role = "cause"

    @property
    def is_verdict(self) -> bool:
        """Whether it says how the run is as a whole, and names no cause."""
        return self.role != "cause"
