"""TF32 in float32 matrix products: the knob, and torch's two generations of switches, which must not disagree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe import trace_counts
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run

NEW = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))  # since torch 2.9
TF32_KERNELS = re.compile(r"tf32|_s1688(?!.*(?:f16|bf16|fp16))", re.IGNORECASE)
FP32_MATRIX_KERNELS = re.compile(r"sgemm|f32f32_f32f32|simt", re.IGNORECASE)
_CONVOLUTION = re.compile(r"fprop|dgrad|wgrad|conv", re.IGNORECASE)  # where some ran in TF32 before, others may
_NO_NAME = "no matmul kernel in the trace shows by its name whether it uses TF32"


class Tf32(Knob):
    """TF32 for float32 matrix products and convolutions."""

    name = "tf32"
    lesson = "07_mixed_precision"
    title = "TF32"
    help = "float32 matmuls on tensor cores with a 10-bit mantissa: Ampere GPUs and newer"
    kind: Kind = "backend setting"
    changes_training = "lower-precision matmuls: compare the losses"
    options: tuple[Value, ...] = (False, True)
    refusal_rests_on = ("device",)
    helps_against: Mapping[str, int] = {"no_tf32": 1}

    def value_in(self, observation: Observation) -> Value | None:
        return observation.tf32

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if observation.device.kind != "cuda":
            return "TF32 needs an NVIDIA GPU, and this run's device is the CPU"
        if observation.tf32 is None:
            return f"{observation.device.name} has no TF32 (needs Ampere or newer); use amp=fp16"
        return None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Set torch's switches, for the whole process."""
        with tf32_set(bool(value)) as changed:
            yield KnobEffects({"settings": changed} if changed else {})

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By the matrix kernels that the baseline does not run: cuDNN's convolutions use TF32 by default."""
        if not effects.counts:
            return Verification("no effect", f"TF32 is already {'on' if value else 'off'} in the baseline")
        names = trace_counts.kernels(run)
        return _turned_on(observation, names) if value else _turned_off(observation, names)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        precision = "high" if value else "highest"
        return CodeEdit(
            f'torch.set_float32_matmul_precision("{precision}")\ntorch.backends.cudnn.allow_tf32 = {bool(value)}'
        )


def _turned_on(observation: Observation, names: tuple[str, ...]) -> Verification:
    before = trace_counts.first_match(TF32_KERNELS, tuple(sorted(observation.operators)))
    counted = (n for n in names if n not in observation.operators and not (before and _CONVOLUTION.search(n)))
    new = trace_counts.first_match(TF32_KERNELS, tuple(counted))
    if new is not None and observation.operators:
        return Verification("took effect", f"a TF32 kernel ran that the baseline does not run: {new}")
    fp32 = trace_counts.first_match(FP32_MATRIX_KERNELS, names)
    if fp32 is not None and new is None:
        return Verification("no effect", f"a float32 matmul kernel ran: {fp32}")
    tf32 = trace_counts.first_match(TF32_KERNELS, names)
    if tf32 is not None:
        return Verification("cannot tell", f"{tf32} may belong to a convolution, which uses TF32 in the baseline, too")
    return Verification("cannot tell", _NO_NAME)


def _turned_off(observation: Observation, names: tuple[str, ...]) -> Verification:
    tf32 = trace_counts.first_match(TF32_KERNELS, names)
    if tf32 is not None:
        return Verification("no effect", f"a TF32 kernel ran: {tf32}")
    fp32 = trace_counts.first_match(FP32_MATRIX_KERNELS, names)
    before = trace_counts.first_match(TF32_KERNELS, tuple(sorted(observation.operators)))
    if fp32 is None or before is None:
        return Verification("cannot tell", _NO_NAME)
    return Verification("took effect", f"a float32 matmul kernel ran: {fp32}; the baseline ran {before}")


@contextmanager
def tf32_set(on: bool) -> Iterator[int]:
    """Let matrix products and cuDNN use TF32 or not; gives how many settings that changed. For the whole process.

    The old switches also set the new ones, so they are used as long as they can be read; code that has used the new
    ones alone finds only those changed.
    """
    import torch

    before_old, before_new = _old(), _new()
    try:
        if before_old is None:
            for key in NEW[:3]:
                torch._C._set_fp32_precision_setter(*key, "tf32" if on else "ieee")
        else:
            torch.backends.cuda.matmul.allow_tf32 = on
            torch.backends.cudnn.allow_tf32 = on
        yield _changes(before_old, before_new, on)
    finally:
        _put_back(before_old, before_new)


def _old() -> tuple[str, bool] | None:
    import torch

    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision(), bool(torch.backends.cudnn.allow_tf32)
    return None


def _new() -> dict[tuple[str, str], str]:
    import torch

    getter: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
    return {key: getter(*key) for key in NEW} if getter is not None else {}


def _changes(old: tuple[str, bool] | None, new: dict[tuple[str, str], str], on: bool) -> int:
    if old is None:
        return sum((new[key] == "tf32") != on for key in NEW[:3])
    return ((old[0] != "highest") != on) + (old[1] != on)


def _put_back(old: tuple[str, bool] | None, new: dict[tuple[str, str], str]) -> None:
    import torch

    if old is not None:
        torch.set_float32_matmul_precision(old[0])
        torch.backends.cudnn.allow_tf32 = old[1]
    for key, value in new.items():
        torch._C._set_fp32_precision_setter(*key, value)


TF32 = Tf32()
