"""What a knob is: one change to how a cell runs that needs no edit of the cell and puts back what it found.

All that a knob knows of itself stands in its own class: the command, the bench, experiments and the climb ask it.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Literal

from msgspec import Struct, field

from gpulab.errors import UsageError
from gpulab.knobs.observation import Observation
from gpulab.run import Environment, Run

Value = bool | int | float | str
Kind = Literal["DataLoader option", "module call", "optimizer option", "backend setting", "variable"]
State = Literal["took effect", "no effect", "cannot tell"]


class KnobEffects(Struct):
    """What a knob really did while the code ran: `apply` notes it, `verify` reads it.

    `counts` says how often something was changed ("loaders", "module calls", "optimizers"); `refusals` why something
    was left as it was, in words for the user; `notes` what else they should know. `preparation_s` was spent to make
    ready, while the code waited: it is no part of any step.
    """

    counts: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    preparation_s: float = 0.0

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def refuse(self, why: str) -> None:
        """Say, once, why something was left as it was."""
        if why not in self.refusals:
            self.refusals.append(why)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)


class Verification(Struct, frozen=True):
    """Whether a change took effect, and by which evidence: a sentence without a full stop."""

    state: State
    evidence: str


def took_effect(evidence: str) -> Verification:
    return Verification("took effect", evidence)


def no_effect(evidence: str) -> Verification:
    return Verification("no effect", evidence)


def cannot_tell(evidence: str) -> Verification:
    return Verification("cannot tell", evidence)


class LoopEnd(Struct, frozen=True):
    """The last lines of a training loop: the backward pass and the step, every `batches` batches, `scaled` or not."""

    batches: int = 1
    scaled: bool = False  # by a GradScaler

    def joined_with(self, other: LoopEnd) -> LoopEnd:
        """One end that does what both do: of two side by side a reader would run both."""
        return LoopEnd(max(self.batches, other.batches), self.scaled or other.scaled)

    @property
    def text(self) -> str:
        loss = "loss" if self.batches == 1 else f"loss / {self.batches}"
        if self.scaled:
            backward = f"scaler.scale({loss}).backward()"
        else:
            backward = f"{loss if self.batches == 1 else f'({loss})'}.backward()"
        step = ["scaler.step(optimizer)", "scaler.update()"] if self.scaled else ["optimizer.step()"]
        if self.batches > 1:
            step = [f"if (i + 1) % {self.batches} == 0:  # i counts the batches"] + [
                f"    {line}" for line in (*step, "optimizer.zero_grad()")
            ]
        return "\n".join([backward, *step])


class CodeEdit(Struct, frozen=True):
    """How to keep a value: `keyword=literal` goes into the `call` where the cell has one, else `snippet` is shown.

    `call` is the name of a call as the user writes it ("DataLoader"); empty where there is only the snippet, which is
    `lines` and the end of the loop where that changes too. In `literal` the word `keyword` is what the cell has; where
    that is more than a name, `once` computes it once. `title` is for `literal` that does not say what it keeps.
    """

    lines: str
    call: str = ""
    keyword: str = ""
    literal: str = ""
    once: str = ""
    title: str = ""
    loop_end: LoopEnd | None = None

    @property
    def wraps(self) -> bool:
        """Whether the literal needs the value that the cell has."""
        return bool(self.keyword) and self.literal_for("") != self.literal

    def literal_for(self, old: str) -> str:
        is_name = not self.once or re.fullmatch(r"(?!i\b)[^\W\d]\w*(\.\w+)*", old)
        return re.sub(rf"\b{self.keyword}\b", lambda _: old, self.literal if is_name else self.once)

    @property
    def snippet(self) -> str:
        end = self.loop_end.text if self.loop_end is not None else ""
        return "\n".join(part for part in (self.lines, end) if part)


class StepTimes(Struct, frozen=True):
    """What a climb has measured when it chooses the next value. `cores`: those that this process may use."""

    cores: float = 1.0
    step_us: float = 0.0
    data_wait_us: float | None = None  # of a step


class Knob(ABC):
    """One knob. Values are plain data; `None` in place of a value means unknown.

    What has a default here is left out by a knob for which the default is true.
    """

    name: str  # as in `--set NAME=VALUE`
    title: str  # as in the bench
    help: str  # one line: what it changes and when that helps
    kind: Kind  # what it changes
    # (False, True) is a switch, words are all there are, of numbers those that the bench proposes
    options: tuple[Value, ...]
    least: int = 1  # of a number
    spellings: Mapping[str, str] = MappingProxyType({})  # other ways to write an option
    climb_values: tuple[Value, ...] = ()  # that a climb tries, the likeliest first; a switch is switched on
    lesson: str = ""  # the notebook that teaches it, without folder and ending; empty: none
    aliases: tuple[str, ...] = ()  # what else it is called, for the hint at the nearest name
    changes_training: str = ""  # why another value is another training and not only another speed; empty: it is not
    cost: str = ""  # what more of it takes, as a sentence; empty: nothing to speak of
    same_training: bool = False  # it changes when batches come or who makes them, nothing that is computed from them
    changes_steps: bool = False  # another value is another number of optimizer steps per epoch
    needs: tuple[str, ...] = ()  # knobs whose value it depends on: where they are taken back, so is this one
    slow_to_prepare: bool = False  # compiling for one: a short block of it would be nothing else
    of_ranks: bool = False  # it does nothing in one process alone, and is no toggle of the bench
    starts_processes: bool = False  # that must be able to import the dataset
    # parts of an observation with which alone `refuses` is certain, so that it can be asked before anything runs
    refusal_rests_on: tuple[Literal["device", "modules"], ...] = ()
    change_counts: tuple[str, ...] = ()  # what `apply` counts in the effects where it changes something
    idle_text: str = "your code already has this"  # why nothing was changed, with {} for the value
    # finding → how early this knob is tried against it where the finding names none: 1 comes first
    helps_against: Mapping[str, int] = MappingProxyType({})

    def parse(self, raw: object) -> Value:
        """The value that a user wrote, as a text or in code: from there on it has the knob's own type.

        Raises UsageError naming the knob, the raw value and the nearest valid one.
        """
        if self.options == (False, True):
            return choice(self.name, raw, ("on", "off"), _SWITCH) == "on"
        if isinstance(self.options[0], str):
            return choice(self.name, raw, [str(option) for option in self.options], self.spellings)
        number = as_number(raw)
        if number == round(number) and number >= self.least:
            return round(number)
        raise UsageError(f"{self.name} must be an integer ≥ {self.least}, got {str(raw).strip()!r}.")

    @abstractmethod
    def value_in(self, observation: Observation) -> Value | None:
        """The value as the cell has it; None where that cannot be seen."""

    @abstractmethod
    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Why it cannot be set to that value here, with the cure where there is one; None where it can."""

    def machine_refuses(self, value: Value) -> str | None:
        """Why no code on this machine can have that value; None where some can."""
        return None

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        """What speaks against a value without forbidding it."""
        return ()

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Set it for the code that runs inside, on this thread; put back everything at the end, whatever happens.

        Entered once per block, after the capture's hooks are in place and in any order with other knobs.
        """
        effects = KnobEffects()
        with ExitStack() as undo:
            self.apply(value, effects, undo)
            yield effects

    @abstractmethod
    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Set it, and have `undo` put it back. What really happens is noted in `effects`, also later.

        What has to outlive a block (a filled cache) stays in the knob object until `forget`.
        """

    def forget(self) -> None:
        """The experiment is over: release what is shared between its blocks."""
        return

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """Whether it took effect in `run`, a run in which it was applied; traced where tracing was possible.

        `observation` is of the baseline. It had no effect where nothing of `counted` was changed.
        """
        if self.change_counts and not any(effects.counts[what] for what in self.change_counts):
            return no_effect("; ".join(effects.refusals) or self.idle_words(observation, value, effects))
        return self.evidence(observation, value, effects, run)

    @abstractmethod
    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """The same, where something was changed: what in the run shows that it had the value."""

    def idle_words(self, observation: Observation, value: Value, effects: KnobEffects) -> str:
        """Why nothing was changed, though nothing spoke against it."""
        return self.idle_text.format(setting_text(value))

    def without(self, observation: Observation) -> Observation:
        """The observation of a run in which it was applied, without what the knob itself added."""
        return observation

    def environment_with(self, environment: Environment, value: Value) -> Environment:
        """The environment that a run had in which it was applied; `environment` was read after it was put back."""
        return environment

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """What a climb tries next where the cell has `value`, the likeliest first."""
        return self.climb_values or ((True,) if self.options == (False, True) else ())

    @abstractmethod
    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        """The edit of the user's code that keeps it."""


_SWITCH = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off"}


def setting_text(value: object) -> str:
    """A value as a user writes it: a switch is on or off."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def choice(name: str, raw: object, options: Sequence[str], spellings: Mapping[str, str]) -> str:
    """One of a few words. Raises UsageError."""
    text = str(raw).strip()
    word = spellings.get(text.lower(), text.lower())
    if word in options:
        return word
    near = [o for o in options if word and o.startswith(word)] or difflib.get_close_matches(word, options, n=1)
    hint = f" Did you mean {name}={near[0]}?" if near else ""
    raise UsageError(f"{name} must be one of {', '.join(options)}, got {text!r}.{hint}")


def as_number(raw: object) -> float:
    """The finite number that a text or a value means; -1 where it is none."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return -1.0
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        return -1.0
    return number if math.isfinite(number) else -1.0
