"""The base class of knobs: a knob changes how a cell runs, without an edit of the cell, and restores the former state.

Everything about one knob is in its class: the command, the bench, experiments and the climb query the class.
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
    """What a knob really did while the code ran: `apply` records it, `verify` reads it.

    `counts`: how often something was changed ("loaders", "module calls", "optimizers"); `refusals`: why something was
    left unchanged, in words for the user; `notes`: other facts for the user. `preparation_s`: time that the code waited
    for preparation, which is part of no step.
    """

    counts: Counter[str] = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    preparation_s: float = 0.0

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def refuse(self, why: str) -> None:
        """Record, once, why something was left unchanged."""
        if why not in self.refusals:
            self.refusals.append(why)

    def note(self, what: str) -> None:
        if what not in self.notes:
            self.notes.append(what)


class Verification(Struct, frozen=True):
    """Whether a change took effect, and the evidence: a sentence without a full stop."""

    state: State
    evidence: str


def took_effect(evidence: str) -> Verification:
    return Verification("took effect", evidence)


def no_effect(evidence: str) -> Verification:
    return Verification("no effect", evidence)


def cannot_tell(evidence: str) -> Verification:
    return Verification("cannot tell", evidence)


class LoopEnd(Struct, frozen=True):
    """The last lines of a training loop: the backward pass, and a step every `batches` batches."""

    batches: int = 1
    scaled: bool = False  # by a GradScaler

    def joined_with(self, other: LoopEnd) -> LoopEnd:
        """One end that does the work of both: a reader would run two side by side."""
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
    """Makes a value permanent: `keyword=literal` goes into the `call` if the cell has one, else `snippet` is shown.

    `call`: the name of a call as the user writes it ("DataLoader"); empty if there is only the snippet, which is
    `lines` and `loop_end`. In `literal` the word `keyword` is replaced by the cell's present expression; if that is
    more than a name, `once` is used, which evaluates it once. `title`: heading for a `literal` that is not
    self-explanatory.
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
        """Whether the literal contains the cell's present expression."""
        return bool(self.keyword) and self.literal_for("") != self.literal

    def literal_for(self, old: str) -> str:
        is_name = not self.once or re.fullmatch(r"(?!i\b)[^\W\d]\w*(\.\w+)*", old)
        return re.sub(rf"\b{self.keyword}\b", lambda _: old, self.literal if is_name else self.once)

    @property
    def snippet(self) -> str:
        end = self.loop_end.text if self.loop_end is not None else ""
        return "\n".join(part for part in (self.lines, end) if part)


class StepTimes(Struct, frozen=True):
    """What a climb has measured when it chooses the next value. `cores`: how many this process may use."""

    cores: float = 1.0
    step_us: float = 0.0
    data_wait_us: float | None = None  # of a step


class Knob(ABC):
    """One knob. Values are plain data; None instead of a value means unknown.

    A knob overrides an attribute or a method only if the default here does not fit.
    """

    name: str  # as in `--set NAME=VALUE`
    title: str  # as in the bench
    help: str  # one line: what it changes and when that helps
    kind: Kind  # what it changes
    # (False, True): a switch; words: all possible values; numbers: the values that the bench proposes
    options: tuple[Value, ...]
    least: int = 1  # the smallest valid number
    spellings: Mapping[str, str] = MappingProxyType({})  # other ways to write an option
    climb_values: tuple[Value, ...] = ()  # a climb tries them, the likeliest first; a switch is switched on
    lesson: str = ""  # the notebook that teaches it, without folder and ending; empty: none
    aliases: tuple[str, ...] = ()  # other names, to suggest this knob for them
    changes_training: str = ""  # why another value changes the training, not only the speed; empty: it does not
    cost: str = ""  # the price of a larger value, as a sentence; empty: negligible
    same_training: bool = False  # it changes when and where batches are made, but no computed value
    changes_steps: bool = False  # it changes the number of optimizer steps per epoch
    needs: tuple[str, ...] = ()  # knobs that it depends on: if they are reset, so is this one
    slow_to_prepare: bool = False  # preparation (compiling) would fill a short block
    of_ranks: bool = False  # it has no effect in a single process, and is no toggle of the bench
    starts_processes: bool = False  # they must be able to import the dataset
    # parts of an observation that suffice for `refuses`, so that it can be called before anything runs
    refusal_rests_on: tuple[Literal["device", "modules"], ...] = ()
    change_counts: tuple[str, ...] = ()  # the counts in the effects that show a change by `apply`
    idle_text: str = "your code already has this"  # why nothing was changed, with {} for the value
    # finding → rank of this knob among the cures, if the finding itself names none: 1 comes first
    helps_against: Mapping[str, int] = MappingProxyType({})

    def parse(self, raw: object) -> Value:
        """The value that a user wrote, as text or in code, converted to the knob's own type.

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
        """The cell's own value; None if it cannot be determined."""

    @abstractmethod
    def refuses(self, observation: Observation, value: Value) -> str | None:
        """Why it cannot be set to that value here, with a remedy if there is one; None if it can."""

    def machine_refuses(self, value: Value) -> str | None:
        """Why no code on this machine can have that value; None if some code can."""
        return None

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        """Reasons against a value that do not forbid it."""
        return ()

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Set it for the code that runs inside, on this thread; at the end everything is restored, whatever happens.

        Entered once per block, after the capture's hooks are installed, in any order with other knobs.
        """
        effects = KnobEffects()
        with ExitStack() as undo:
            self.apply(value, effects, undo)
            yield effects

    @abstractmethod
    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Set it, and register its restoration with `undo`. Effects are recorded in `effects`, also later.

        State that outlives a block (a filled cache) stays in the knob object until `forget`.
        """

    def forget(self) -> None:
        """The experiment is over: release what is shared between its blocks."""
        return

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """Whether it took effect in `run`, a run in which it was applied, traced if tracing was possible.

        `observation` is of the baseline. If all counts in `change_counts` are zero, it had no effect.
        """
        if self.change_counts and not any(effects.counts[what] for what in self.change_counts):
            return no_effect("; ".join(effects.refusals) or self.idle_words(observation, value, effects))
        return self.evidence(observation, value, effects, run)

    @abstractmethod
    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """As `verify`, once something was changed: what in the run shows that it had the value."""

    def idle_words(self, observation: Observation, value: Value, effects: KnobEffects) -> str:
        """Why nothing was changed although nothing was refused."""
        return self.idle_text.format(setting_text(value))

    def without(self, observation: Observation) -> Observation:
        """The observation of a run in which it was applied, without the knob's own effects."""
        return observation

    def environment_with(self, environment: Environment, value: Value) -> Environment:
        """The environment during a run in which it was applied; `environment` was read after the restoration."""
        return environment

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """The values that a climb tries next if the cell has `value`, the likeliest first."""
        return self.climb_values or ((True,) if self.options == (False, True) else ())

    @abstractmethod
    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        """The edit of the user's code that makes the value permanent."""


_SWITCH = {"true": "on", "yes": "on", "1": "on", "false": "off", "no": "off", "0": "off"}


def setting_text(value: object) -> str:
    """A value as a user writes it: a switch is "on" or "off"."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def choice(name: str, raw: object, options: Sequence[str], spellings: Mapping[str, str]) -> str:
    """The option that a word denotes. Raises UsageError if there is none."""
    text = str(raw).strip()
    word = spellings.get(text.lower(), text.lower())
    if word in options:
        return word
    near = [o for o in options if word and o.startswith(word)] or difflib.get_close_matches(word, options, n=1)
    hint = f" Did you mean {name}={near[0]}?" if near else ""
    raise UsageError(f"{name} must be one of {', '.join(options)}, got {text!r}.{hint}")


def as_number(raw: object) -> float:
    """The finite number that a text or a value denotes; -1 if it is none."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        return -1.0
    try:
        number = float(raw)
    except (ValueError, OverflowError):
        return -1.0
    return number if math.isfinite(number) else -1.0
