"""The bytes that an update moves: the table follows from torch.optim's own passes, and all who cite it agree."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gpulab
from gpulab.analysis.facts import facts
from gpulab.analysis.optimizer_work import UpdateBytes, bytes_of_update
from gpulab.diagnosis.finding import Finding, RuleContext
from gpulab.diagnosis.optimizer import unfused_optimizer
from gpulab.prediction.predict import predict
from gpulab.thresholds import DEFAULT
from tests.support.loops import Machine, loop

NUMBERS = 4096
KINDS: list[tuple[str, dict[str, Any], int]] = [  # class, arguments, passes that weight decay and Nesterov add
    ("SGD", {}, 0),
    ("SGD", {"weight_decay": 0.1}, 1),
    ("SGD", {"momentum": 0.9}, 0),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, 1),
    ("SGD", {"momentum": 0.9, "nesterov": True}, 1),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 2),
    ("Adam", {}, 0),
    ("Adam", {"weight_decay": 0.1}, 1),
    ("AdamW", {}, 0),
    ("Adagrad", {}, 0),
    ("Adagrad", {"weight_decay": 0.1}, 1),
]


class CountedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operators read and write of tensors as large as the parameter, each tensor once per operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.per_number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read: set[int] = set()
        written: set[int] = set()
        for i, argument in enumerate(func._schema.arguments):
            given = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
            at = _addresses(given)
            read |= at
            # A fused update names the gradients as written, which it does only where they were scaled.
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
                written |= at
        written |= _addresses(result) - read
        self.per_number += 4 * (len(read) + len(written)) if written else 0
        return result


def _addresses(values: Any) -> set[int]:
    tensors = [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
    return {t.data_ptr() for t in tensors if t.numel() == NUMBERS}


def counted(name: str, arguments: dict[str, Any], style: str) -> int:
    """Bytes of each parameter that the third update moves: the first ones make the optimizer's state."""
    parameter = torch.nn.Parameter(torch.randn(NUMBERS))
    how = {"foreach": style == "foreach"} if style != "fused" else {"fused": True}
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **arguments, **how)
    for _ in range(3):
        parameter.grad = torch.randn(NUMBERS)
        moved = CountedBytes()
        with moved:
            optimizer.step()
    return moved.per_number


@pytest.mark.parametrize("style", ["for-loop", "foreach"])
@pytest.mark.parametrize(("name", "arguments", "further_adds"), KINDS)
def test_the_table_follows_from_counted_passes(
    name: str, arguments: dict[str, Any], further_adds: int, style: str
) -> None:
    moved = bytes_of_update(
        name, has_momentum="momentum" in arguments, further_adds=further_adds, foreach=style == "foreach"
    )
    assert moved == UpdateBytes(counted(name, arguments, style), counted(name, arguments, "fused"))


@pytest.mark.parametrize("style", ["for-loop", "foreach"])
@pytest.mark.parametrize(("name", "arguments", "further_adds"), KINDS[2:8])
def test_a_trace_tells_which_passes_an_update_makes(
    name: str, arguments: dict[str, Any], further_adds: int, style: str
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=style == "foreach", **arguments)
    with gpulab.profile(show=False, save=False, live=False, device="cpu", steps=14) as profiled:
        for _ in range(20):
            model(torch.zeros(4, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    work = facts(profiled.run).optimizer
    assert work is not None and (work.style, work.further_adds) == (style, further_adds)
    assert work.update_bytes is not None
    assert work.update_bytes.unfused_bytes == counted(name, arguments, style)


def test_what_pytorch_cannot_fuse_has_no_bytes() -> None:
    assert bytes_of_update("RMSprop") is None


def updating(
    name: str,
    operators: list[str],
    *,
    forward_us: float,
    gpu_us: float,
    host_us: float,
    step_us: float | None = None,
    optimizer_us: int = 0,
) -> RuleContext:
    """Steps of five products and an update by these operators; `step_us`, `optimizer_us`: those of unprofiled ones."""

    def step(machine: Machine) -> None:
        for _ in range(5):
            machine.operator("aten::mm", "sgemm", forward_us / 5, 20)
        start = machine.host
        for operator in operators:
            machine.operator(f"aten::{operator}", "multi_tensor_apply_kernel", gpu_us, host_us)
        machine.mark(f"Optimizer.step#{name}.step", start)
        machine.call("cudaDeviceSynchronize", 1, waits=True)

    run = loop(step).facts(unprofiled_us=step_us).run
    steps = replace(run.steps, optimizer_ns=np.full(len(run.steps), optimizer_us * 1_000))
    return RuleContext(facts(replace(run, steps=steps)), DEFAULT)


@pytest.mark.parametrize(
    ("name", "operators", "percent"),
    [
        ("SGD", ("mul_", "add_", "add_"), 62),
        ("SGD", ("add", "mul_", "add_", "add_"), 45),
        ("SGD", ("mul_", "add_", "add_", "add_"), 45),
        ("SGD", ("add", "mul_", "add_", "add_", "add_"), 36),
        ("AdamW", ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_"), 35),
    ],
)
def test_the_finding_and_its_prediction_tell_the_same_share(
    name: str, operators: tuple[str, ...], percent: int
) -> None:
    foreach = [f"_foreach_{operator}" for operator in operators]
    case = updating(name, foreach, forward_us=500, gpu_us=40, host_us=200, step_us=2_000, optimizer_us=400)
    finding = unfused_optimizer(case)
    assert isinstance(finding, Finding)
    prediction = predict(case.facts, {"fused_optimizer": "True"})
    told = "\n".join((*(evidence.words for evidence in finding.evidence), prediction.basis))
    shares = re.findall(rf"[Aa] fused {name} moves (\d+) ?% of the bytes", told)
    assert [int(share) for share in shares] == [percent, percent]


def test_fusing_a_plain_sgd_gives_back_no_work_of_the_gpu() -> None:
    case = updating("SGD", ["_foreach_add_"], forward_us=1_000, gpu_us=400, host_us=20)
    assert case.facts.optimizer is not None and case.facts.optimizer.device_us == pytest.approx(400)
    assert unfused_optimizer(case) is None


@pytest.mark.parametrize(("operator", "bytes_moved"), [("_fused_adamw_", 28), ("_foreach_addcdiv_", 80)])
def test_kept_gradients_count_against_the_bytes_of_the_update(operator: str, bytes_moved: int) -> None:
    case = updating("AdamW", [operator], forward_us=1_000, gpu_us=1_000, host_us=20, step_us=2_100, optimizer_us=20)
    ratio = predict(case.facts, {"accumulate": "1000"}).ratio
    assert ratio == pytest.approx((1_000 + 1_000 * 12 / bytes_moved) / 2_000, rel=0.05)
