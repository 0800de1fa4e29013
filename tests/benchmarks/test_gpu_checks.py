"""What tests/gpu measures with, shown on a CPU: a test there that cannot pass, or cannot fail, is seen here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from gpulab.run import Category, Timeline
from tests.support.gpu_checks import (
    Cell,
    Convolutions,
    Products,
    apart_fraction,
    delays_ns,
    first_step_ns,
    kernels,
    lost_launches,
    product_error,
    profiled,
    switched_and_plain,
)
from tests.support.paths import TESTS
from tests.support.timelines import MAIN, STREAM, Span, timeline

HEAD, STEPS = 10, 40  # kernels launched before the first step, and in the steps


@pytest.mark.parametrize("fused", [True, False])
def test_two_cells_end_with_the_same_weights_per_optimizer(fused: bool) -> None:
    cell, plain = switched_and_plain("cpu", fused=fused)
    assert all(cell.optimizer.state[p]["step"] == 4 for p in cell.model.parameters())
    assert apart_fraction((cell, plain)) < 0.01
    one_more = Cell("cpu")
    one_more.run(5)
    assert apart_fraction((one_more, plain)) > 0.3, "a step too many is seen"


def test_another_batch_is_seen() -> None:
    cells = Cell("cpu"), Cell("cpu")
    cells[1].x = torch.randn_like(cells[1].x)
    for cell in cells:
        cell.run(4)
    assert apart_fraction(cells) > 0.3


@pytest.mark.parametrize("network", [Convolutions, Products])
def test_the_cells_for_tf32_train(network: type[torch.nn.Module]) -> None:
    cell = Cell("cpu", network)
    with torch.profiler.profile() as profile:
        cell.run(1)
    names = {event.key for event in profile.key_averages()}
    assert ("aten::addmm" in names) is (network is Products)
    assert ("aten::convolution" in names) is (network is Convolutions)


def test_the_error_of_a_product_tells_its_format() -> None:
    assert product_error("cpu") < 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product_error("cpu") > 1e-4


def test_the_runs_of_the_gpu_tests_are_not_saved(own_store: Path) -> None:
    run = profiled(steps=8, device="cpu", width=16)
    assert len(run.steps) == 8
    assert not own_store.exists()


def played(*lost: int, without_launch: int | None = None, early: int | None = None) -> Timeline:
    """Ten kernels launched before the first step, forty in it; those of the positions `lost` did not come back."""
    spans = [Span("ProfilerStep#7", Category.USER_ANNOTATION, MAIN, 1_000 * HEAD, 1_000 * STEPS)]
    for i in range(HEAD + STEPS):
        begin = 1_000 * i + 100
        if i != without_launch:
            spans.append(Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, begin, 200, 1 + i))
        if i not in lost:
            start = begin - 50_000 if i == early else begin + 1_000_000
            spans.append(Span("a_kernel", Category.KERNEL, STREAM, start, 10, 1 + i))
    return timeline(spans)


def test_only_launches_of_the_steps_are_judged() -> None:
    assert first_step_ns(played()) == 1_000 * HEAD
    assert lost_launches(played(*range(HEAD))) == (0, STEPS)
    assert lost_launches(played(0, HEAD, HEAD + 3)) == (2, STEPS)
    assert len(kernels(played())) == STEPS
    assert set(delays_ns(played())) == {1_000_000}


def test_kernels_without_a_launch_and_before_it_are_seen() -> None:
    assert delays_ns(played(without_launch=HEAD + 1)).count(None) == 1
    assert min(d for d in delays_ns(played(early=HEAD + 1)) if d is not None) == -50_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run where there is a GPU")
@pytest.mark.parametrize("file", sorted((TESTS / "gpu").glob("test_*.py")), ids=lambda file: file.stem)
def test_a_file_of_gpu_tests_can_be_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each skips itself before it imports what it tests; this sees what a GPU would be the first to see."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.syspath_prepend(str(file.parent))
    try:
        module = importlib.import_module(file.stem)
    finally:
        sys.modules.pop(file.stem, None)
    assert any(name.startswith("test_") for name in vars(module))
