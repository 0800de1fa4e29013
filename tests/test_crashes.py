"""After an error of the GPU that stays: the user's own exception is the one seen, and nothing of gpulab goes on."""

from __future__ import annotations

import torch
from fake_cuda import ASSERT, FakeCuda

from gpulab.capture.window import Window


def test_a_window_on_a_lost_gpu(fake_cuda: FakeCuda) -> None:
    fake_cuda.start()
    window = Window("cuda", 0)
    window.start()
    torch.ones(3) + 1
    fake_cuda.error = ASSERT
    recording = window.stop()
    assert not torch._C._autograd._profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled
    assert "aten::add" in recording.timeline(0).names, "what was recorded of the host is kept"
