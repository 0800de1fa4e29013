"""The scripted `torch.cuda` keeps the rules of the real one, as far as gpulab's tests lean on them."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.fake_cuda import OVERWRITTEN, FakeCuda


def test_events_around_work_tell_its_length(fake_cuda: FakeCuda) -> None:
    fake_cuda.clock_ns = 1_000
    fake_cuda.start()
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    fake_cuda.enqueue(5_000_000)
    after.record()
    assert before.query() and not after.query(), "the host runs ahead"
    with pytest.raises(RuntimeError, match="must be completed"):
        before.elapsed_time(after)
    torch.cuda.synchronize()
    assert before.elapsed_time(after) == 5.0
    assert fake_cuda.clock_ns == 5_001_000


def test_an_event_after_idle_time_has_the_hosts_time(fake_cuda: FakeCuda) -> None:
    fake_cuda.clock_ns = 0
    fake_cuda.start()
    first, second = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    fake_cuda.enqueue(2_000_000)
    fake_cuda.clock_ns = 9_000_000
    second.record()
    assert first.elapsed_time(second) == 9.0


def test_waiting_in_a_capture_makes_it_invalid(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()

    def captures() -> None:
        with fake_cuda.capture():
            assert torch.cuda.is_current_stream_capturing()
            with pytest.raises(RuntimeError, match="not permitted"):
                torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        captures()
    assert fake_cuda.violations == ["synchronize"]
    assert not torch.cuda.is_current_stream_capturing()


def test_what_is_launched_in_a_capture_is_part_of_the_graph(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    event, loss = torch.cuda.Event(enable_timing=True), fake_cuda.tensor(1.0)
    with fake_cuda.capture():
        event.record()
        loss.clone()
    assert fake_cuda.captured == ["Event.record", "Tensor.clone"]
    with pytest.raises(ValueError, match="must be recorded"):
        event.elapsed_time(event)


def test_an_error_stays(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    loss = fake_cuda.tensor(1.0)
    with pytest.raises(RuntimeError, match="device-side assert"):
        fake_cuda.fail()
    for call in (torch.cuda.synchronize, torch.cuda.Event().record, torch.cuda.empty_cache, loss.item):
        with pytest.raises(RuntimeError, match="device-side assert"):
            call()
    assert torch.cuda.is_initialized() and torch.cuda.max_memory_allocated() == 0, "these ask torch only"


def test_contexts_and_who_started_cuda(fake_cuda: FakeCuda) -> None:
    assert (torch.cuda.memory_stats(), fake_cuda.started_by) == ({}, None)
    torch.cuda.synchronize(0)
    assert fake_cuda.started_by == "synchronize"
    fake_cuda.start(0)
    torch.cuda.synchronize(1)
    assert fake_cuda.contexts == [(0, "synchronize"), (1, "synchronize")]


def test_a_gpu_that_another_process_holds(fake_cuda: FakeCuda) -> None:
    fake_cuda.start(0)
    fake_cuda.taken = {1}
    with pytest.raises(RuntimeError, match="busy or unavailable"):
        torch.cuda.mem_get_info(1)


def test_memory_comes_back_with_its_object(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    block = fake_cuda.allocate(60 * 2**30)
    with pytest.raises(torch.OutOfMemoryError):
        fake_cuda.allocate(60 * 2**30)
    assert torch.cuda.memory_allocated(0) == 60 * 2**30 == block.size_bytes
    del block
    gc.collect()
    assert torch.cuda.memory_allocated(0) == 0 and torch.cuda.memory_reserved(0) == 60 * 2**30
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(0) == 0 and torch.cuda.max_memory_allocated(0) == 60 * 2**30


def test_a_tensor_that_a_graph_has_overwritten(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    loss = fake_cuda.tensor(1.5)
    seen, copied = loss.detach(), loss.clone()
    loss.overwritten = True
    with pytest.raises(RuntimeError, match=OVERWRITTEN[:40]):
        float(seen)
    assert float(copied) == 1.5 and loss.is_cuda and loss.device == torch.device("cuda", 0)
