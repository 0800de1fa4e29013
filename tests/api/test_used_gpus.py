"""Waiting for GPUs, putting a training back, drawing random numbers: only on GPUs that the user's code uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from gpulab.capture.arguments import UpdateDetector
from gpulab.capture.profiler import StepEvents
from gpulab.devices import gpus
from gpulab.errors import DeviceLost
from gpulab.patching.randomness import preserving_randomness
from gpulab.snapshot.state import State
from gpulab.tuning.execute import release, seeded
from tests.support.fake_cuda import ILLEGAL_ACCESS, FakeCuda


def trained() -> dict[str, Any]:
    """A model, and an optimizer that has stepped."""
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


def test_only_gpus_are_waited_for(fake_cuda: FakeCuda) -> None:
    fake_cuda.clock_ns = 0
    fake_cuda.start(1)
    fake_cuda.enqueue(7_000_000)
    assert gpus.in_use() == [1]
    gpus.synchronize()
    assert fake_cuda.calls == ["launch", "synchronize"] and fake_cuda.clock_ns == 7_000_000
    assert fake_cuda.contexts == []


def test_an_allocator_that_counts_nothing(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object = None) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda, "memory_reserved", refuse)
    fake_cuda.start(1)
    assert gpus.in_use() == [1]


def test_a_training_is_put_back_without_a_context_on_another_gpu(fake_cuda: FakeCuda) -> None:
    fake_cuda.start(0)
    fake_cuda.taken = {1}  # another process holds it alone
    namespace = trained()
    state = State.of(namespace, None)
    assert fake_cuda.calls == ["synchronize", "synchronize"], "before and after the copies: streams do not wait"
    before = namespace["model"].weight.clone()
    namespace["model"].weight.data.zero_()
    assert state.restore().could_not == ()
    assert torch.equal(namespace["model"].weight, before)
    assert "synchronize" in fake_cuda.calls and fake_cuda.contexts == []


def test_weights_are_not_looked_at_while_a_graph_is_captured(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    weight = fake_cuda.tensor(2.0).requires_grad_()
    updates = UpdateDetector()
    with fake_cuda.capture():
        updates.begin(weight * 3)
    assert fake_cuda.captured == [] and not updates.since_first()
    assert fake_cuda.launches == []
    updates.begin(weight * 3)
    assert fake_cuda.launches == ["Tensor.clone"]
    weight.data.add_(1)
    with fake_cuda.capture():
        assert not updates.since_first()
    assert fake_cuda.captured == [] and updates.since_first()


@pytest.mark.parametrize("inside", [preserving_randomness, lambda: seeded(3)], ids=["kept", "seeded"])
def test_cuda_is_not_started(fake_cuda: FakeCuda, inside: Callable[[], AbstractContextManager[None]]) -> None:
    state = State.of(trained(), None)
    with inside():
        torch.rand(2)
    state.restore()
    assert fake_cuda.calls == [] and not fake_cuda.initialized


@pytest.mark.parametrize("inside", [preserving_randomness, lambda: seeded(3)], ids=["kept", "seeded"])
def test_the_users_error_passes_where_rng_cannot_be_restored(
    fake_cuda: FakeCuda, inside: Callable[[], AbstractContextManager[None]]
) -> None:
    fake_cuda.start()
    cpu = torch.get_rng_state()
    with pytest.raises(RuntimeError) as caught, inside():
        fake_cuda.fail()
    assert [entry.name for entry in caught.traceback][-2:] == ["fail", "call"] and caught.value.__context__ is None
    assert torch.equal(torch.get_rng_state(), cpu)


def test_a_lost_gpu_hinders_nothing_that_is_released(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    fake_cuda.error = ILLEGAL_ACCESS
    release(RuntimeError("of an arm"))
    StepEvents().mark(1)
    asked = {"current_stream", "empty_cache", "is_current_stream_capturing"}
    assert set(fake_cuda.calls) == asked, "each of them raised"


def test_random_numbers_of_gpus_are_put_back(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    for inside in (preserving_randomness(), seeded(3)):
        with inside:
            fake_cuda.random_states = [state + 1 for state in fake_cuda.random_states]
        assert [int(state[0]) for state in fake_cuda.random_states] == [0, 1]


def test_an_error_that_stays_is_told_from_one_that_came_late(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.start()
    assert gpus.lost() is None
    late, wait = [RuntimeError("CUDA error: invalid configuration argument")], torch.cuda.synchronize

    def once(device: torch.device | str | int | None = None) -> None:
        if late:
            raise late.pop()
        wait(device)

    monkeypatch.setattr(torch.cuda, "synchronize", once)
    assert gpus.lost() is None
    fake_cuda.error = ILLEGAL_ACCESS
    with pytest.raises(
        DeviceLost, match=r"illegal memory access was encountered\. Restart the kernel: after this error the CUDA con"
    ):
        gpus.synchronize()


def test_a_training_on_a_lost_gpu_is_not_touched(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    namespace = trained()
    state = State.of(namespace, None)
    namespace["model"].weight.data.zero_()
    namespace["epoch"] = 3
    fake_cuda.error = ILLEGAL_ACCESS
    with pytest.raises(DeviceLost):
        state.restore()
    assert not namespace["model"].weight.any() and namespace["epoch"] == 3
    with pytest.raises(DeviceLost):
        State.of(namespace, None)
