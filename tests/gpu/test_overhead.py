"""What gpulab costs a GPU step of about 10 ms: measured side by side and printed, never asserted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import gpulab  # noqa: E402

pytestmark = pytest.mark.gpu

STEP_S = 0.010
STEPS, SETTLED, ROUNDS = 100, 60, 5  # the last profiled window lies between steps 40 and 46


def step_of_10_ms() -> Callable[[], None]:
    """A training step with one small parameter and as many matrix products as take 10 ms here."""
    weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    a = torch.randn(2048, 2048, device="cuda")

    def products(count: int) -> None:
        for _ in range(count):
            a @ a
        torch.cuda.synchronize()

    products(50)
    start = time.perf_counter()
    products(50)
    count = max(1, round(50 * STEP_S / (time.perf_counter() - start)))

    def step() -> None:
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        products(count)

    return step


def settled_step_ms(step: Callable[[], None]) -> float:
    """Median of the last steps, by a clock of our own."""
    times: list[float] = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[SETTLED:])


def test_overhead_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of_10_ms()
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "gpulab, no trace": lambda: gpulab.profile(trace=False, show=False, save=False),
        "gpulab, after its profiled window": lambda: gpulab.profile(show=False, save=False),
    }
    ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with way():
                ms[name].append(settled_step_ms(step))
    with capsys.disabled():
        print(f"\n  {torch.cuda.get_device_name()}, torch {torch.__version__}: a step of about 10 ms")
        for name, found in ms.items():
            ratios = [x / bare for x, bare in zip(found, ms["bare"], strict=True)]
            more = f"{100 * (statistics.median(ratios) - 1):+.2f} % (of {ROUNDS} rounds: " + ", ".join(
                f"{100 * (r - 1):+.2f}" for r in sorted(ratios)
            )
            print(f"  {name:<36} {statistics.median(found):8.3f} ms  {'' if name == 'bare' else more + ')'}")
    assert all(len(found) == ROUNDS for found in ms.values())
