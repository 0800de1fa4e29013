"""Knobs that set a switch of torch's for the whole process: TF32, the attention back end, compute threads, checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec.structs import replace

from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, StepTimes, Value, Verification
from gpulab.knobs.observation import Observation, first_match, kernel_names, trace_counts
from gpulab.run import Environment, Run
from gpulab.torch_hooks.patching import replaced

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
        names = kernel_names(run)
        return _turned_on(observation, names) if value else _turned_off(observation, names)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        precision = "high" if value else "highest"
        return CodeEdit(
            f'torch.set_float32_matmul_precision("{precision}")\ntorch.backends.cudnn.allow_tf32 = {bool(value)}'
        )


def _turned_on(observation: Observation, names: tuple[str, ...]) -> Verification:
    before = first_match(TF32_KERNELS, tuple(sorted(observation.operators)))
    counted = (n for n in names if n not in observation.operators and not (before and _CONVOLUTION.search(n)))
    new = first_match(TF32_KERNELS, tuple(counted))
    if new is not None and observation.operators:
        return Verification("took effect", f"a TF32 kernel ran that the baseline does not run: {new}")
    fp32 = first_match(FP32_MATRIX_KERNELS, names)
    if fp32 is not None and new is None:
        return Verification("no effect", f"a float32 matmul kernel ran: {fp32}")
    tf32 = first_match(TF32_KERNELS, names)
    if tf32 is not None:
        return Verification("cannot tell", f"{tf32} may belong to a convolution, which uses TF32 in the baseline, too")
    return Verification("cannot tell", _NO_NAME)


def _turned_off(observation: Observation, names: tuple[str, ...]) -> Verification:
    tf32 = first_match(TF32_KERNELS, names)
    if tf32 is not None:
        return Verification("no effect", f"a TF32 kernel ran: {tf32}")
    fp32 = first_match(FP32_MATRIX_KERNELS, names)
    before = first_match(TF32_KERNELS, tuple(sorted(observation.operators)))
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


BACKENDS = {"math": "MATH", "efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}
NOT_TRACED = (
    "whether your code uses scaled_dot_product_attention shows only in a trace, and no step was traced: "
    "run more steps, without --no-trace"
)
OPERATOR = "scaled_dot_product"


class Attention(Knob):
    """The back end of `scaled_dot_product_attention`. What it cannot take goes to math, which takes everything."""

    name = "attention"
    lesson = "08_fused_kernels"
    title = "Attention"
    help = "Backend of scaled_dot_product_attention: flash and efficient do not materialize the attention matrix"
    kind: Kind = "backend setting"
    options: tuple[Value, ...] = ("auto", "math", "efficient", "flash")
    # torch's own choice, then those that keep the attention matrix out of memory
    climb_values: tuple[Value, ...] = ("auto", "flash", "efficient")
    aliases = ("sdpa", "flash")
    spellings: Mapping[str, str] = {"mem_efficient": "efficient"}
    helps_against: Mapping[str, int] = {"unfused_attention": 1}

    def value_in(self, observation: Observation) -> Value | None:
        """torch chooses, as far as can be seen; which it chose is the observation's `attention`."""
        return "auto" if _has_attention(observation) else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if not _has_attention(observation) and not observation.operators:
            return NOT_TRACED
        if not _has_attention(observation):
            return "your code never calls scaled_dot_product_attention; hand-written attention has no backends"
        if value == "efficient" and observation.device.kind == "cpu":
            return "efficient attention needs a GPU; on the CPU choose math or flash"
        return None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """Allow this back end, for the whole process; regions of the cell's own that choose one still do."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        effects = KnobEffects()
        if value == "auto":
            yield effects
            return
        allowed = [getattr(SDPBackend, BACKENDS[str(value)]), SDPBackend.MATH]
        with sdpa_kernel(list(dict.fromkeys(allowed))):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        counts = trace_counts(run)
        if counts is None:
            return Verification("cannot tell", "no trace to show which backend ran")
        forward = {n: c for n, c in counts.items() if not n.endswith("_backward")}
        ran = {n.removeprefix("aten::"): c for n, c in forward.items() if n.startswith(f"aten::_{OPERATOR}")}
        if not ran and value == "math" and observation.attention not in (None, "math"):  # torch.compile takes it apart
            return Verification("took effect", f"{observation.attention} attention is no longer in the trace")
        if not ran:
            return Verification("cannot tell", "no attention in the trace")
        operator, count = max(ran.items(), key=lambda item: item[1])
        words = f"{count} calls of {operator}"
        if value == "auto":
            return Verification("no effect", f"{words}; the baseline lets torch choose, too")
        if str(value) not in operator:
            return Verification("no effect", f"{words}: {value} attention does not support these inputs")
        if observation.attention == value:
            return Verification("no effect", f"{words}, as in the baseline")
        return Verification("took effect", words)

    def without(self, observation: Observation) -> Observation:
        """What the baseline uses is not seen beside the back end that was chosen for it."""
        return replace(observation, attention=None)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == "auto":
            return CodeEdit("# remove sdpa_kernel(…): torch chooses")
        backends = list(dict.fromkeys([BACKENDS[str(value)], "MATH"]))
        listed = ", ".join(f"SDPBackend.{b}" for b in backends)
        return CodeEdit(
            "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
            f"with sdpa_kernel([{listed}]):\n    …  # the training loop"
        )


def _has_attention(observation: Observation) -> bool:
    return observation.attention is not None or any(OPERATOR in name for name in observation.operators)


ATTENTION = Attention()


_THREADS_AT_END = "threads at the end"


class ComputeThreads(Knob):
    """torch.set_num_threads. Worker processes of a DataLoader compute with one thread each in any case."""

    name = "compute_threads"
    title = "Compute threads"
    help = "Intra-op threads on the CPU: fewer threads leave cores for DataLoader workers"
    kind: Kind = "backend setting"
    options: tuple[Value, ...] = (1, 2, 4, 8)
    aliases = ("threads", "num_threads")
    same_training = True

    def value_in(self, observation: Observation) -> Value | None:
        """torch's setting at the end of the reference run."""
        return observation.compute_threads

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if observation.device.kind == "cuda":
            return "this run computes on the GPU: these threads only run CPU operators"
        if observation.compute_threads is None:
            return "PyTorch's thread count was not observed"
        return None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        """For the whole process."""
        import torch

        effects, before = KnobEffects(), torch.get_num_threads()
        torch.set_num_threads(int(value))
        try:
            yield effects
        finally:
            effects.counts[_THREADS_AT_END] = torch.get_num_threads()
            torch.set_num_threads(before)

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """By torch's own number when the code was over: the code may set it, too."""
        count = effects.counts.get(_THREADS_AT_END)
        if count is None:
            return Verification("cannot tell", "the run did not finish")
        if count != value:
            return Verification("no effect", f"the code sets the thread count itself: PyTorch had {count} at the end")
        return Verification("took effect", f"PyTorch had {count} at the end of the run")

    def environment_with(self, environment: Environment, value: Value) -> Environment:
        return replace(environment, compute_threads=int(value))

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """Half as many, for small operators lose more by being shared than they gain; else all cores."""
        now, cores = int(value or 1), max(1, math.floor(times.cores))
        counts = [cores, now // 2] if now < cores else [now // 2]
        return [count for count in counts if count]

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(f"torch.set_num_threads({value})  # before the loop")


COMPUTE_THREADS = ComputeThreads()


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
