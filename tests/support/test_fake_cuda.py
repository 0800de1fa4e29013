"""The scripted `torch.cuda` notes each breach of the rules: tests assert that it has noted none."""

from __future__ import annotations

import pytest
import torch

from tests.support.fake_cuda import FakeCuda


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


def test_contexts_and_who_started_cuda(fake_cuda: FakeCuda) -> None:
    assert (torch.cuda.memory_stats(), fake_cuda.started_by) == ({}, None)
    torch.cuda.synchronize(0)
    assert fake_cuda.started_by == "synchronize"
    fake_cuda.start(0)
    torch.cuda.synchronize(1)
    assert fake_cuda.contexts == [(0, "synchronize"), (1, "synchronize")]
