"""One run of the user's code with knobs applied, inside a capture that somebody else has begun."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from msgspec import Struct

from gpulab.knobs.knob import KnobEffects
from gpulab.knobs.observe.observation import Observation
from gpulab.knobs.observe.watch import Observed, observe
from gpulab.knobs.variable_reads import watching
from gpulab.knobs.variables import is_plain, setting_names
from gpulab.run import Change, Run
from gpulab.tuning.plan import Arm, Code
from gpulab.tuning.resolve import ResolvedArm, changes_unseen, outside_of, resolve_beforehand

OBSERVATIONS_KEPT = 50


class _Remembered(Struct, frozen=True):
    """What code was seen to use as written, and whether each name that it reads is still what it was then."""

    observation: Observation
    same: Mapping[str, Callable[[object], bool]]


_observations: dict[str, _Remembered] = {}  # of cells that ran as written in this process, by their text


def remember(code: Code, observation: Observation) -> None:
    """What this code was just seen to use as written."""
    names = code.namespace
    same = {name: _sameness(names[name]) for name in code.variables.read if name in names}
    _observations.pop(code.text, None)
    _observations[code.text] = _Remembered(observation, same)
    for old in list(_observations)[:-OBSERVATIONS_KEPT]:
        del _observations[old]


def observation_of(code: Code) -> Observation | None:
    """What this code was seen to use; None where it did not run as written yet, or reads other objects now."""
    remembered = _observations.get(code.text)
    names = code.namespace
    if remembered is None or not all(name in names and same(names[name]) for name, same in remembered.same.items()):
        return None
    return remembered.observation


def _sameness(value: object) -> Callable[[object], bool]:
    if is_plain(value):
        return lambda now: type(now) is type(value) and now == value
    try:
        there = weakref.ref(value)
    except TypeError:  # a list or dict of objects
        place = id(value)
        return lambda now: id(now) == place
    return lambda now: there() is now


class Changing:
    """The settings of an arm for one run. Raises UsageError for a name that is neither a knob nor a variable."""

    def __init__(self, arm: Arm, code: Code) -> None:
        self._written = observation_of(code)
        self.decided: ResolvedArm = resolve_beforehand(arm, self._written, code)
        self.code = code.replacing(self.decided.variables)
        literals = code.variables.literals
        self._literals = {n: literals[n] for n in self.decided.variables if n in literals}
        self._effects: dict[str, KnobEffects] = {}
        self._seen = Observed()

    @contextmanager
    def applied(self) -> Iterator[Code]:
        """Everything is set inside; the code to run."""
        decided = self.decided
        with ExitStack() as stack:
            stack.callback(self._put_literals_back)
            stack.enter_context(setting_names(self.code.namespace, outside_of(self.code, decided.variables)))
            self._effects = {k.name: stack.enter_context(k.applied(v)) for k, v in decided.knobs.items()}
            self._seen = stack.enter_context(observe())  # over the knobs: it sees loaders before they change them
            lines, reads = stack.enter_context(watching(self.code.namespace, decided.variables))
            self._effects.update(reads)
            yield self.code.through(lines) if reads else self.code

    def _put_literals_back(self) -> None:
        """What the code has made of a literal set for it becomes what it would have made of its own."""
        names = self.code.namespace
        for name, literal in self._literals.items():
            value = self.decided.variables[name]
            if name in names and type(names[name]) is type(value) and names[name] == value:
                names[name] = literal

    def changes(self, run: Run) -> tuple[Change, ...]:
        """Whether they took effect in that run."""
        return changes_unseen(self.decided, self._written, self._seen.observation(run), self._effects, run)
