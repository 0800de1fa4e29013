"""Knobs for process-wide switches of torch: TF32, the attention back end, compute threads, checks."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from gpulab.knobs.knob import (
    CodeEdit,
    Knob,
    KnobEffects,
    StepTimes,
    Value,
    Verification,
    cannot_tell,
    no_effect,
    took_effect,
)
from gpulab.knobs.observation import Observation, first_match, kernel_names, trace_counts
from gpulab.patching.attributes import replaced
from gpulab.run import Environment, Run

PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))  # since torch 2.9
TF32_KERNELS = re.compile(r"tf32|_s1688(?!.*(?:f16|bf16|fp16))", re.IGNORECASE)
FP32_MATRIX_KERNELS = re.compile(r"sgemm|f32f32_f32f32|simt", re.IGNORECASE)
_CONVOLUTION = re.compile(r"fprop|dgrad|wgrad|conv", re.IGNORECASE)  # if some used TF32 before, others may
_NO_NAME = "no matmul kernel in the trace shows by its name whether it uses TF32"

ATTENTION_BACKENDS = {"math": "MATH", "efficient": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}
ATTENTION_OPERATOR = "scaled_dot_product"
NOT_TRACED = (
    "whether your code uses scaled_dot_product_attention shows only in a trace, and no step was traced: "
    "run more steps, without --no-trace"
)

_AT_END = "at the end of the run"


class Tf32(Knob):
    """TF32 for float32 matrix products and convolutions, by torch's old and new switches, which must agree."""

    name = "tf32"
    lesson = "07_mixed_precision"
    title = "TF32"
    help = "float32 matmuls on tensor cores with a 10-bit mantissa: Ampere GPUs and newer"
    kind = "backend setting"
    changes_training = "lower-precision matmuls: compare the losses"
    options = (False, True)
    refusal_rests_on = ("device",)
    change_counts = ("settings",)
    idle_text = "TF32 is already {} in the baseline"
    helps_against = {"no_tf32": 1}

    def value_in(self, observation: Observation) -> Value | None:
        return observation.tf32

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if observation.device.kind != "cuda":
            return "TF32 needs an NVIDIA GPU, and this run's device is the CPU"
        if observation.tf32 is None:
            return f"{observation.device.name} has no TF32 (needs Ampere or newer); use amp=fp16"
        return None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Set the old switches, which also set the new ones, as long as the old ones can be read.

        If the code has used the new switches alone, only these are changed.
        """
        import torch

        set_precision, cudnn = torch._C._set_fp32_precision_setter, torch.backends.cudnn
        get_precision: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
        present = {key: get_precision(*key) for key in PRECISIONS} if get_precision is not None else {}
        for key, precision in present.items():
            undo.callback(set_precision, *key, precision)
        try:
            matmul, convolution = torch.get_float32_matmul_precision(), bool(cudnn.allow_tf32)
        except RuntimeError:
            changed = sum((present[key] == "tf32") != value for key in PRECISIONS[:3])
            for key in PRECISIONS[:3]:
                set_precision(*key, "tf32" if value else "ieee")
        else:
            undo.callback(setattr, cudnn, "allow_tf32", convolution)
            undo.callback(torch.set_float32_matmul_precision, matmul)
            changed = ((matmul != "highest") != value) + (convolution != value)
            torch.backends.cuda.matmul.allow_tf32 = cudnn.allow_tf32 = bool(value)
        if changed:
            effects.counts["settings"] = changed

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        """Judges by matrix kernels that the baseline does not run: cuDNN's convolutions use TF32 by default."""
        names = kernel_names(run)
        tf32, fp32 = first_match(TF32_KERNELS, names), first_match(FP32_MATRIX_KERNELS, names)
        before = first_match(TF32_KERNELS, tuple(sorted(observation.operators)))
        if not value and tf32 is not None:
            return no_effect(f"a TF32 kernel ran: {tf32}")
        if not value and fp32 is not None and before is not None:
            return took_effect(f"a float32 matmul kernel ran: {fp32}; the baseline ran {before}")
        if not value:
            return cannot_tell(_NO_NAME)
        candidates = (n for n in names if n not in observation.operators and not (before and _CONVOLUTION.search(n)))
        new = first_match(TF32_KERNELS, tuple(candidates))
        if new is not None and observation.operators:
            return took_effect(f"a TF32 kernel ran that the baseline does not run: {new}")
        if fp32 is not None and new is None:
            return no_effect(f"a float32 matmul kernel ran: {fp32}")
        if tf32 is None:
            return cannot_tell(_NO_NAME)
        return cannot_tell(f"{tf32} may belong to a convolution, which uses TF32 in the baseline, too")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        precision = "high" if value else "highest"
        return CodeEdit(
            f'torch.set_float32_matmul_precision("{precision}")\ntorch.backends.cudnn.allow_tf32 = {bool(value)}'
        )


class Attention(Knob):
    """The back end of `scaled_dot_product_attention`. Inputs that it does not support fall back to `math`."""

    name = "attention"
    lesson = "08_fused_kernels"
    title = "Attention"
    help = "Backend of scaled_dot_product_attention: flash and efficient do not materialize the attention matrix"
    kind = "backend setting"
    options = ("auto", "math", "efficient", "flash")
    # torch's own choice, then the back ends that do not materialize the attention matrix
    climb_values = ("auto", "flash", "efficient")
    aliases = ("sdpa", "flash")
    spellings = {"mem_efficient": "efficient"}
    helps_against = {"unfused_attention": 1}

    def value_in(self, observation: Observation) -> Value | None:
        """Torch chooses ("auto"); its choice is the observation's `attention`."""
        return "auto" if _has_attention(observation) else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if not _has_attention(observation) and not observation.operators:
            return NOT_TRACED
        if not _has_attention(observation):
            return "your code never calls scaled_dot_product_attention; hand-written attention has no backends"
        if value == "efficient" and observation.device.kind == "cpu":
            return "efficient attention needs a GPU; on the CPU choose math or flash"
        return None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Allow only this back end; regions of the cell that choose one still do."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if value != "auto":
            undo.enter_context(sdpa_kernel([getattr(SDPBackend, name) for name in _allowed(value)]))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        counts = trace_counts(run)
        if counts is None:
            return cannot_tell("no trace to show which backend ran")
        forward = {n: c for n, c in counts.items() if not n.endswith("_backward")}
        prefix = f"aten::_{ATTENTION_OPERATOR}"
        ran = {n.removeprefix("aten::"): c for n, c in forward.items() if n.startswith(prefix)}
        if not ran and value == "math" and observation.attention not in (None, "math"):  # torch.compile decomposes it
            return took_effect(f"{observation.attention} attention is no longer in the trace")
        if not ran:
            return cannot_tell("no attention in the trace")
        operator, count = max(ran.items(), key=lambda item: item[1])
        words = f"{count} calls of {operator}"
        if value == "auto":
            return no_effect(f"{words}; the baseline lets torch choose, too")
        if str(value) not in operator:
            return no_effect(f"{words}: {value} attention does not support these inputs")
        if observation.attention == value:
            return no_effect(f"{words}, as in the baseline")
        return took_effect(words)

    def without(self, observation: Observation) -> Observation:
        """Drops the back end: the baseline's back end does not show in a run with another one."""
        return replace(observation, attention=None)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == "auto":
            return CodeEdit("# remove sdpa_kernel(…): torch chooses")
        listed = ", ".join(f"SDPBackend.{name}" for name in _allowed(value))
        return CodeEdit(
            "from torch.nn.attention import SDPBackend, sdpa_kernel\n\n"
            f"with sdpa_kernel([{listed}]):\n    …  # the training loop"
        )


def _has_attention(observation: Observation) -> bool:
    return observation.attention is not None or any(ATTENTION_OPERATOR in name for name in observation.operators)


def _allowed(value: Value) -> list[str]:
    """The names of torch's back ends that this value allows."""
    return list(dict.fromkeys([ATTENTION_BACKENDS[str(value)], "MATH"]))


class OwnSetting(Knob):
    """A setting that can be read from torch. It is read again at the end: the code may set it, too."""

    kind = "backend setting"
    same_training = True
    edit: str  # with {} for the value

    @abstractmethod
    def words(self, value: Value) -> str:
        """Part of a sentence: torch had this value."""

    def restore_at_end(
        self, read: Callable[[], Value], write: Callable[..., object], effects: KnobEffects, undo: ExitStack
    ) -> None:
        """At the end of the code, note the value that `read` returns, then restore the present value."""
        undo.callback(write, read())
        undo.callback(lambda: effects.counts.update({_AT_END: int(read())}))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        if _AT_END not in effects.counts:
            return cannot_tell("the run did not finish")
        last = effects.counts[_AT_END]
        words = f"{self.words(last)} {_AT_END}"
        if last != value:
            return no_effect(f"the code sets it itself: {words}")
        return took_effect(words)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(self.edit.replace("{}", str(value)))


class ComputeThreads(OwnSetting):
    """How many CPU threads PyTorch uses for an operator: fewer threads leave cores to the data-loading processes.

    Worker processes of a DataLoader always compute with one thread each.
    """

    name = "compute_threads"
    title = "Compute threads"
    help = "Intra-op threads on the CPU: fewer threads leave cores for DataLoader workers"
    options = (1, 2, 4, 8)
    aliases = ("threads", "num_threads")
    edit = "torch.set_num_threads({})  # before the loop"

    def words(self, value: Value) -> str:
        return f"PyTorch had {value}"

    def value_in(self, observation: Observation) -> Value | None:
        """torch's setting at the end of the reference run."""
        return observation.compute_threads

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if observation.device.kind == "cuda":
            return "this run computes on the GPU: these threads only run CPU operators"
        if observation.compute_threads is None:
            return "PyTorch's thread count was not observed"
        return None

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        import torch

        self.restore_at_end(torch.get_num_threads, torch.set_num_threads, effects, undo)
        torch.set_num_threads(int(value))

    def environment_with(self, environment: Environment, value: Value) -> Environment:
        return replace(environment, compute_threads=int(value))

    def next_values(self, value: Value | None, times: StepTimes) -> Sequence[Value]:
        """Half as many, because small operators lose more by parallelism than they gain; else all cores."""
        now, cores = int(value or 1), max(1, math.floor(times.cores))
        counts = [cores, now // 2] if now < cores else [now // 2]
        return [count for count in counts if count]


class Check(OwnSetting):
    """A check that torch makes during training. The knob can only switch it off."""

    options = (False, True)
    climb_values = (False,)

    def words(self, value: Value) -> str:
        return f"{self.title.lower()} was {'on' if value else 'off'}"

    def value_in(self, observation: Observation) -> Value | None:
        return True if self.name in observation.checks else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        if self.name not in observation.checks:
            return f"your code does not run with {self.title.lower()}, as far as gpulab observed"
        return None


class Anomaly(Check):
    """Autograd's anomaly detection, however it was switched on. Set to off, it stays off even if the code sets it."""

    name = "anomaly"
    title = "Anomaly detection"
    help = "Autograd notes the stack at each operator and looks for NaN: for debugging only"
    aliases = ("detect_anomaly", "anomaly_detection")
    helps_against = {"anomaly_detection": 1}
    edit = "torch.autograd.set_detect_anomaly({})  # before the loop; in Lightning detect_anomaly={}"

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        import torch

        checks_nan = torch.is_anomaly_check_nan_enabled()

        def set_anomaly(on: bool) -> None:
            torch.set_anomaly_enabled(on, checks_nan)

        def holding(original: Any) -> Any:
            def set_anomaly_enabled(mode: bool, check_nan: bool = True) -> None:
                original(mode and bool(value), check_nan)

            return set_anomaly_enabled

        self.restore_at_end(torch.is_anomaly_enabled, set_anomaly, effects, undo)
        undo.enter_context(replaced(torch, "set_anomaly_enabled", holding))
        set_anomaly(torch.is_anomaly_enabled())


class ValidateArgs(Check):
    """Whether torch.distributions checks arguments and samples. A distribution with `validate_args=True` still does."""

    name = "validate_args"
    title = "Argument validation"
    help = "torch.distributions checks every argument and sample: switch it off once the code is right"
    aliases = ("argument_validation", "set_default_validate_args")
    helps_against = {"argument_validation": 1}
    edit = "torch.distributions.Distribution.set_default_validate_args({})  # before the loop"

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        from torch.distributions import Distribution

        write = Distribution.set_default_validate_args
        self.restore_at_end(lambda: Distribution._validate_args, write, effects, undo)
        write(bool(value))


TF32, ATTENTION, COMPUTE_THREADS = Tf32(), Attention(), ComputeThreads()
ANOMALY, VALIDATE_ARGS = Anomaly(), ValidateArgs()
