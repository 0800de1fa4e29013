"""Whether names were read while code ran: by its own lines, or by functions of its namespace that were seen to run.

Own lines read through a mapping in place of the namespace. Functions are heard of by `sys.setprofile`, which slows
Python down: only until each name was read, and no longer than the first steps, which are warm-up.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from gpulab.knobs.knob import KnobEffects, Verification, cannot_tell, no_effect, took_effect
from gpulab.run import Run
from gpulab.torch_hooks.hook_points import step_hooks
from gpulab.user_code import global_names

STEPS_WATCHED = 2
EVENTS_WATCHED = 1_000_000  # about 0.3 s, for code without an optimizer
_PROCESS_LOOKED_AT = 1024  # events: a worker that was forked meanwhile hears as well

SEEN, TO_THE_END = "seen", "watched to the end"  # counts of a name's effects; its first note says who read it

EffectsByName = Mapping[str, KnobEffects]


class Lines(UserDict[str, Any]):
    """The namespace as the code's own lines use it: all goes through, and reads of the values set are noted."""

    def __init__(self, namespace: dict[str, Any], values: Mapping[str, object], effects: EffectsByName) -> None:
        self.data = namespace
        self.values_set = values
        self.effects = effects

    def __getitem__(self, name: str) -> Any:
        value = self.data[name]
        if name in self.values_set and _is_set(value, self.values_set[name]):
            _note(self.effects[name], "your code read the variable")
        return value


@contextmanager
def watching(namespace: dict[str, Any], values: Mapping[str, object]) -> Iterator[tuple[Lines, EffectsByName]]:
    """Note what code inside reads of the names set to these values; its own lines have to use the `Lines`."""
    effects = {name: KnobEffects() for name in values}
    lines = Lines(namespace, values, effects)
    with _Functions(lines).listening():
        yield lines, effects


def verify(value: object, before: object, used: bool, effects: KnobEffects, run: Run) -> Verification:
    """Whether a variable took effect. `used`: the code has something that could read it."""
    if _is_set(before, value):
        return no_effect(f"the value is already {value!r}")
    if effects.counts[SEEN]:
        return took_effect(effects.notes[0])
    elsewhere = run.loader is not None and run.loader.num_workers > 0
    if not used or (effects.counts[TO_THE_END] and not elsewhere):
        return no_effect("nothing read the variable while the code ran")
    places = "in worker processes or after the first steps" if elsewhere else "after the first steps"
    return cannot_tell(f"nothing was seen to read the variable, but reads inside functions {places} are not visible")


class _Functions:
    """Hears which functions of a namespace run."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._namespace = lines.data
        self._values = lines.values_set
        self._effects = lines.effects
        self._names: dict[CodeType, set[str]] = {}  # that each code reads, of those set
        self._events = 0
        self._steps = 0
        self._process = os.getpid()
        self._hear = self._heard  # one object, to be told from another's

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear, unless there is nothing to hear, or somebody else's profile function is there."""
        if not self._values or sys.getprofile() is not None:
            yield
            return
        with step_hooks(self._stepped):
            sys.setprofile(self._hear)
            try:
                yield
            finally:
                self._end()

    def _end(self) -> None:
        if sys.getprofile() == self._hear:
            for one in self._effects.values():
                one.count(TO_THE_END)
        self._stop()

    def _stop(self) -> None:
        if sys.getprofile() == self._hear:
            sys.setprofile(None)

    def _stepped(self, *_: object) -> None:
        self._steps += 1
        if self._steps >= STEPS_WATCHED:
            self._stop()

    def _heard(self, frame: FrameType, event: str, arg: object) -> None:
        self._events += 1
        if event == "call" and frame.f_globals is self._namespace:
            self._entered(frame)
        if self._events % _PROCESS_LOOKED_AT == 0 and (self._events >= EVENTS_WATCHED or os.getpid() != self._process):
            self._stop()

    def _entered(self, frame: FrameType) -> None:
        code = frame.f_code
        names = self._names.get(code)
        if names is None:
            names = self._names[code] = global_names(code).reads & self._values.keys()
        if not names or (not code.co_flags & inspect.CO_OPTIMIZED and frame.f_locals is self._lines):
            return
        for name in names:
            if _is_set(self._namespace.get(name), self._values[name]):
                _note(self._effects[name], f"{code.co_qualname} ran, which reads the variable")
        if all(one.counts for one in self._effects.values()):
            self._stop()


def _note(effects: KnobEffects, who: str) -> None:
    if not effects.counts:
        effects.count(SEEN)
        effects.note(who)


def _is_set(present: object, value: object) -> bool:
    return type(present) is type(value) and present == value
