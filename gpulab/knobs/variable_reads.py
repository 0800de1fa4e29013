"""Observes whether names are read while code runs: by its own lines, or by functions of its namespace that it calls.

The code's own lines use a mapping instead of the namespace. Calls of functions are observed with `sys.setprofile`,
which slows Python down; so that ends once every name was read, at the latest with the first steps, which are warm-up.
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
from gpulab.patching.hook_points import step_hooks
from gpulab.run import Run
from gpulab.user_code import global_names

MOST_STEPS = 2
MOST_EVENTS = 1_000_000  # about 0.3 s, for code without an optimizer
_EVENTS_PER_CHECK = 1024  # a forked worker inherits the profile function

READ, TO_THE_END = "read", "observed to the end"  # counts of a name's effects; its first note says who read it

EffectsByName = Mapping[str, KnobEffects]


class Lines(UserDict[str, Any]):
    """The namespace for the code's own lines: passes everything through and records reads of the set values."""

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
def observing_reads(namespace: dict[str, Any], values: Mapping[str, object]) -> Iterator[tuple[Lines, EffectsByName]]:
    """Record which of these names the code inside reads; the code's own lines must use the `Lines`."""
    effects = {name: KnobEffects() for name in values}
    lines = Lines(namespace, values, effects)
    with _Functions(lines).installed():
        yield lines, effects


def verify(value: object, before: object, used: bool, effects: KnobEffects, run: Run) -> Verification:
    """Whether a variable took effect. `used`: the code contains a possible reader."""
    if _is_set(before, value):
        return no_effect(f"the value is already {value!r}")
    if effects.counts[READ]:
        return took_effect(effects.notes[0])
    elsewhere = run.loader is not None and run.loader.num_workers > 0
    if not used or (effects.counts[TO_THE_END] and not elsewhere):
        return no_effect("nothing read the variable while the code ran")
    places = "in worker processes or after the first steps" if elsewhere else "after the first steps"
    return cannot_tell(f"no read of the variable was observed, but reads inside functions {places} are not visible")


class _Functions:
    """Observes which functions of a namespace run."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._namespace = lines.data
        self._values = lines.values_set
        self._effects = lines.effects
        self._names: dict[CodeType, set[str]] = {}  # set names that each code object reads
        self._events = 0
        self._steps = 0
        self._process = os.getpid()
        self._profile_function = self._on_event  # a fixed object, to compare with the installed function

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe, unless there is nothing to observe or another profile function is installed."""
        if not self._values or sys.getprofile() is not None:
            yield
            return
        with step_hooks(self._on_step):
            sys.setprofile(self._profile_function)
            try:
                yield
            finally:
                self._end()

    def _end(self) -> None:
        if sys.getprofile() == self._profile_function:
            for one in self._effects.values():
                one.count(TO_THE_END)
        self._stop()

    def _stop(self) -> None:
        if sys.getprofile() == self._profile_function:
            sys.setprofile(None)

    def _on_step(self, *_: object) -> None:
        self._steps += 1
        if self._steps >= MOST_STEPS:
            self._stop()

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        self._events += 1
        if event == "call" and frame.f_globals is self._namespace:
            self._on_call(frame)
        if self._events % _EVENTS_PER_CHECK == 0 and (self._events >= MOST_EVENTS or os.getpid() != self._process):
            self._stop()

    def _on_call(self, frame: FrameType) -> None:
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
        effects.count(READ)
        effects.note(who)


def _is_set(present: object, value: object) -> bool:
    return type(present) is type(value) and present == value
