"""What a knob is: one change to how a cell runs that needs no edit of the cell and puts back what it found."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run

Value = bool | int | float | str
Kind = Literal["DataLoader option", "module call", "optimizer option", "backend setting", "variable of the cell"]
State = Literal["took effect", "no effect", "cannot tell"]


@dataclass(slots=True)
class KnobEffects:
    """What a knob really did while the code ran: written by the knob, read by its `verify`.

    `counts` says how often something was changed ("loaders", "module calls", "optimizers"); `refused` why something
    was left as it was, in words for the user; `notes` what else they should know. `preparation_s` was spent to make
    ready, in the code's time but before it went on: no part of any step.
    """

    counts: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    preparation_s: float = 0.0

    def count(self, what: str) -> None:
        """One more."""
        self.counts[what] = self.counts.get(what, 0) + 1

    def refuse(self, why: str) -> None:
        """Say, once, why something was left as it was."""
        if why not in self.refused:
            self.refused.append(why)

    def note(self, what: str) -> None:
        """Say it once."""
        if what not in self.notes:
            self.notes.append(what)


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether a change took effect, and by which evidence: a sentence without a full stop."""

    state: State
    evidence: str


@dataclass(frozen=True, slots=True)
class CodeEdit:
    """How to keep a value: `call` is given `keyword=literal` where it is found in the cell, else `snippet` is shown.

    `call` is the name of a call as the user writes it ("DataLoader"); empty where there is only the snippet.
    """

    snippet: str
    call: str = ""
    keyword: str = ""
    literal: str = ""


class Knob(Protocol):
    """One knob. Values are plain data; `None` in place of a value means unknown."""

    @property
    def name(self) -> str:
        """As in `--set NAME=VALUE`."""

    @property
    def title(self) -> str:
        """As in the panel."""

    @property
    def help(self) -> str:
        """One line: what it changes and when that helps."""

    @property
    def kind(self) -> Kind:
        """What it takes hold of."""

    @property
    def lesson(self) -> str:
        """The notebook that teaches it, without folder and ending; empty: none."""

    @property
    def changes_training(self) -> str:
        """Why another value is another training and not only another speed; empty where it is the same."""

    @property
    def options(self) -> tuple[Value, ...]:
        """All values where they are few, else those the panel proposes."""

    def parse(self, text: str) -> Value:
        """The value that a user wrote. Raises UsageError naming the knob, the text and the nearest valid value."""

    def value_in(self, observation: Observation) -> Value | None:
        """The value as the cell has it; None where that cannot be seen."""

    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Why it cannot be set to that value here, with the cure where there is one; None where it can."""

    def applied(self, value: Value) -> AbstractContextManager[KnobEffects]:
        """Set it for the code that runs inside, on this thread; put back everything at the end, whatever happens.

        Entered once per block, after the capture's hooks are in place and in any order with other knobs. What has
        to outlive a block (a filled cache) is kept by the knob object and dropped by `forget`.
        """

    def forget(self) -> None:
        """The experiment is over: drop what was kept between blocks."""

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """Whether it took effect in `run`, a run in which it was applied; traced where tracing was possible."""

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        """The edit that keeps it."""
