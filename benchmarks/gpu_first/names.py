"""Kernel names by operator and number format, against what gpulab reads out of the name alone.

The operator and the types of its inputs come from the trace (`record_shapes`), joined by "External id": another way
than gpulab's own, which goes by launch and nesting.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct
from msgspec.structs import asdict
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from benchmarks.gpu_first.answer import Answer, listed
from benchmarks.gpu_first.networks import NETWORKS
from benchmarks.gpu_first.stage import Stage
from gpulab.analysis.kernels import class_of
from gpulab.timeline.kernel_names import reading

WARMUPS = 2
EXPECTED = "as operator and input type say"
NARROW = {"c10::Half", "c10::BFloat16"}
# The costliest kernel of such an operator is of that class: PyTorch's native_functions.yaml names the operators.
_CLASS_OF_OPERATOR = (
    ("matrix", r"^aten::(mm|addmm|bmm|baddbmm|_addmm_activation|cudnn_convolution|convolution_backward)$"),
    ("attention", r"^aten::_scaled_dot_product_(flash|efficient|cudnn)_attention(_backward)?$"),
    ("attention", r"^aten::_(flash|efficient)_attention_(forward|backward)$"),
    ("normalization", r"^aten::(cudnn_batch_norm|native_batch_norm|native_layer_norm)(_backward)?$"),
    ("normalization", r"^aten::_(log_)?softmax(_backward_data)?$"),
    ("reduction", r"^aten::sum$"),
    ("pointwise", r"^aten::(add|mul|gelu|gelu_backward|relu|clamp_min|threshold_backward)_?$"),
    ("optimizer", r"^aten::_fused_adamw?_$"),
)
BACKENDS = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Case(Struct, frozen=True):
    """A network in a number format, its attention by one backend, eager or compiled."""

    network: str
    number_format: str  # fp32, TF32, bf16, fp16
    backend: str = "auto"
    mode: str = ""  # of torch.compile; "": eager

    @property
    def name(self) -> str:
        """In words."""
        return ", ".join(filter(None, (self.network, self.number_format, self._attention, self.mode)))

    @property
    def _attention(self) -> str:
        return f"{self.backend} attention" if self.network == "GPT" else ""


EAGER = (
    *(Case(network, fmt) for fmt in ("bf16", "fp32", "TF32", "fp16") for network in ("GPT", "CNN", "MLP")),
    *(Case("GPT", "bf16", backend) for backend in ("flash", "cudnn", "efficient", "math")),
    *(Case("GPT", "fp16", backend) for backend in ("flash", "cudnn", "efficient")),
    *(Case("GPT", fmt, backend) for fmt in ("fp32", "TF32") for backend in ("efficient", "math")),
)
COMPILED = (
    *(Case(network, "bf16", mode="default") for network in ("GPT", "CNN", "MLP")),
    Case("MLP", "bf16", mode="max-autotune-no-cudagraphs"),
    Case("MLP", "TF32", mode="max-autotune-no-cudagraphs"),
    Case("GPT", "bf16", mode="max-autotune-no-cudagraphs"),
)
SMALL = (Case("GPT", "bf16", "math"), Case("CNN", "fp32"), Case("MLP", "fp16"))


class Kernel(Struct, frozen=True):
    """One name under one operator: how often it ran and how long in all."""

    name: str
    operator: str  # "": none is named
    types: tuple[str, ...]
    count: int
    us: float

    @property
    def read_class(self) -> str:
        """As gpulab reads it."""
        return class_of(self.name, self.operator)

    @property
    def read_format(self) -> str:
        """As gpulab reads it."""
        return reading(self.name).numbers


def measure(answer: Answer, stage: Stage, compiled: bool = False) -> None:
    """Every case, each kept as soon as it is there."""
    cases, small = (COMPILED, SMALL[:1]) if compiled else (EAGER, SMALL[1:])
    for case in small if stage.simulated else cases:
        what = f"class and format of all kernels, {case.name}"
        with answer.guarded(what, EXPECTED):
            kernels = kernels_of(traced(stage, case))
            answer.figure(case.name, [asdict(k) | {"class": k.read_class, "format": k.read_format} for k in kernels])
            judge(answer, what, kernels, case.number_format, "simulated" if stage.simulated else "no kernel")


def judge(answer: Answer, what: str, kernels: list[Kernel], case_format: str, why_none: str) -> None:
    """What gpulab reads out of the names against operators and types."""
    if not kernels:
        answer.unmeasured(what, EXPECTED, why_none)
        return
    wrong = [*wrong_classes(kernels), *wrong_formats(kernels, case_format)]
    answer.check(what, EXPECTED, listed(wrong) or "they are", agrees=not wrong)


def traced(stage: Stage, case: Case) -> dict[str, Any]:
    """The trace of one training step, as PyTorch writes it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, inputs, targets = NETWORKS[case.network](stage)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    called: Callable[..., Any] = torch.compile(model, mode=case.mode) if case.mode else model
    scaler = torch.amp.GradScaler(stage.device, enabled=case.number_format == "fp16" and not stage.simulated)

    def step() -> None:
        with autocast(stage, case.number_format):
            loss = F.cross_entropy(called(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    backend = BACKENDS[case.backend]
    with matrix_precision(case.number_format), ExitStack() as stack:
        stack.enter_context(nullcontext() if backend is None else sdpa_kernel(backend))
        for _ in range(WARMUPS):
            step()
        stage.synchronize()
        with profile(activities=stage.activities, record_shapes=True) as session:
            stage.mark()
            _sacrifice(stage)
            step()
            stage.synchronize()
    return exported(session)


def _sacrifice(stage: Stage) -> None:
    """Kernels whose loss does no harm: CUPTI may lose the first ones of a session."""
    x = torch.zeros(16, device=stage.device)
    for _ in range(64):
        x.zero_()
    stage.synchronize()


def exported(session: profile) -> dict[str, Any]:
    """What the session exports, read back."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        session.export_chrome_trace(str(file))
        trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    return trace


def autocast(stage: Stage, number_format: str) -> AbstractContextManager[Any]:
    """Mixed precision for bf16 and fp16."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kind = types.get(number_format)
    return nullcontext() if kind is None else torch.autocast(stage.device, dtype=kind)


@contextmanager
def matrix_precision(number_format: str) -> Iterator[None]:
    """TF32 on or off, in cuBLAS and cuDNN, by the older of torch's two sets of switches."""
    before, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if number_format == "TF32" else "highest")
    torch.backends.cudnn.allow_tf32 = number_format == "TF32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions


def kernels_of(trace: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a trace with their innermost operator, the costliest first."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    operators = {
        e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})
    }
    sums: dict[tuple[str, str, tuple[str, ...]], tuple[int, float]] = {}
    for e in events:
        if e.get("cat") != "kernel":
            continue
        operator = operators.get(e.get("args", {}).get("External id"), {})
        types = tuple(str(t) for t in operator.get("args", {}).get("Input type", ()) if t)
        key = e["name"], operator.get("name", ""), types
        count, us = sums.get(key, (0, 0.0))
        sums[key] = count + 1, us + float(e["dur"])
    kernels = [Kernel(*key, count, us) for key, (count, us) in sums.items()]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def expected_class(operator: str) -> str | None:
    """What the costliest kernel of the operator does; None where that is not certain."""
    return next((kind for kind, pattern in _CLASS_OF_OPERATOR if re.search(pattern, operator)), None)


def wrong_classes(kernels: Iterable[Kernel]) -> list[str]:
    """Of each operator's costliest kernel (they come in that order), where gpulab reads another class.

    Kernels that only reorder images do not count: they may take longer than the convolution they are for.
    """
    wrong, seen = [], set()
    for kernel in kernels:
        key = kernel.operator, kernel.types
        expected = expected_class(kernel.operator)
        if key in seen or expected is None or kernel.read_class == "layout":
            continue
        seen.add(key)
        if kernel.read_class != expected:
            wrong.append(f"{kernel.name[:160]} of {kernel.operator} is {expected}, read as {kernel.read_class}")
    return wrong


def expected_formats(kernel: Kernel, case_format: str) -> frozenset[str]:
    """In what a product may multiply, by the types of its operator's inputs, else by the setting of the case."""
    if NARROW & set(kernel.types) or (not kernel.types and case_format in ("bf16", "fp16")):
        return frozenset({"narrow"})
    # fused attention in fp32 multiplies three times in TF32, whatever the setting (xFormers, OpMultiplyAddFastF32)
    return frozenset({"fp32", "tf32"} if case_format == "TF32" or kernel.read_class == "attention" else {"fp32"})


def wrong_formats(kernels: Iterable[Kernel], case_format: str) -> list[str]:
    """Products whose name gpulab reads as another format. A name that does not tell ("") is not wrong."""
    wrong = []
    for kernel in kernels:
        if kernel.read_class not in ("matrix", "attention") or not kernel.read_format:
            continue
        expected = expected_formats(kernel, case_format)
        if kernel.read_format not in expected:
            of = f"{kernel.operator or 'no operator'}({', '.join(kernel.types)})"
            right = " or ".join(sorted(expected))
            wrong.append(f"{kernel.name[:160]} of {of} is {right}, read as {kernel.read_format}")
    return wrong
