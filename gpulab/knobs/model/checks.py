"""Checks that torch makes while it trains, switched off for a run: what they find was found, or is not looked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run
from gpulab.torch_hooks.patching import replaced

_AT_END = "on at the end"


class Check(Knob):
    """On where the cell, or torch by itself, has it on; it can only be switched off."""

    kind: Kind = "backend setting"
    options: tuple[Value, ...] = (False, True)
    climb_values: tuple[Value, ...] = (False,)
    same_training = True
    edit: str

    def value_in(self, observation: Observation) -> Value | None:
        return True if self.name in observation.checks else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if self.name not in observation.checks:
            return f"your code was not seen to run with {self.title.lower()}"
        return None

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By torch's own switch when the code was over: the code may set it, too."""
        is_on = effects.counts.get(_AT_END)
        if is_on is None:
            return Verification("cannot tell", "the run did not finish")
        what = f"{self.title.lower()} was {'on' if is_on else 'off'} at the end of the run"
        if bool(is_on) is not bool(value):
            return Verification("no effect", f"the code sets it itself: {what}")
        return Verification("took effect", what)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(self.edit.replace("{}", str(bool(value))))


class Anomaly(Check):
    """Autograd's anomaly detection, however it is switched on."""

    name = "anomaly"
    title = "Anomaly detection"
    help = "Autograd notes the stack at each operator and looks for NaN: for debugging only"
    aliases = ("detect_anomaly", "anomaly_detection")
    helps_against: Mapping[str, int] = {"anomaly_detection": 1}
    edit = "torch.autograd.set_detect_anomaly({})  # before the loop; in Lightning detect_anomaly={}"

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """For the whole process; what the code switches on meanwhile stays off."""
        import torch

        effects = KnobEffects()
        was_on, checked = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()

        def holding(original: Any) -> Any:
            def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
                original(mode and bool(value), check_nan)

            return set_anomaly_enabled

        try:
            with replaced(torch, "set_anomaly_enabled", holding):
                torch.set_anomaly_enabled(was_on, checked)
                yield effects
        finally:
            effects.counts[_AT_END] = torch.is_anomaly_enabled()
            torch.set_anomaly_enabled(was_on, checked)


class ValidateArgs(Check):
    """Whether torch.distributions checks arguments and samples where a cell does not say so itself."""

    name = "validate_args"
    title = "Argument validation"
    help = "torch.distributions checks every argument and sample: switch it off once the code is right"
    aliases = ("argument_validation", "set_default_validate_args")
    helps_against: Mapping[str, int] = {"argument_validation": 1}
    edit = "torch.distributions.Distribution.set_default_validate_args({})  # before the loop"

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """For the whole process; where the code asks for it at one distribution, that one is still checked."""
        from torch.distributions import Distribution

        effects, before = KnobEffects(), Distribution._validate_args
        Distribution.set_default_validate_args(bool(value))
        try:
            yield effects
        finally:
            effects.counts[_AT_END] = Distribution._validate_args
            Distribution.set_default_validate_args(before)


ANOMALY, VALIDATE_ARGS = Anomaly(), ValidateArgs()
