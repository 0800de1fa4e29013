"""What a session of the profiler takes: its events grow steadily, and tensors come and go by leaps and bounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpulab
from gpulab.capture import profiler
from gpulab.capture.profiler import MIB, SessionMemory, resident_bytes, return_free_memory


@pytest.mark.parametrize(
    ("grows_mib", "events_mib"),
    [([4] * 10, 40), ([4, 500, 4, -500, 4], 12), ([6, -6] * 10, 0), ([-8, 4], 4), ([200] * 5, 0)],
    ids=["events", "a large tensor", "small ones", "before them", "a model is loaded"],
)
def test_what_grows_steadily_is_of_events(
    grows_mib: list[int], events_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, clock_ns = [1000 * MIB], [0]
    monkeypatch.setattr(profiler, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(profiler, "perf_counter_ns", lambda: clock_ns[0])
    memory = SessionMemory()
    for grown in grows_mib:
        clock_ns[0] += 100_000_000
        resident[0] += grown * MIB
        memory.exceeds(0)
    assert memory.event_bytes == events_mib * MIB
    assert memory.exceeds(events_mib * MIB - 1) and not memory.exceeds(events_mib * MIB)


def test_memory_is_read_and_given_back() -> None:
    assert resident_bytes() > 50 * MIB
    return_free_memory()


@pytest.mark.parametrize(("code", "profiled"), [("model.learn(10)", False), ("loss.backward()", False), ("f(x)", True)])
def test_code_that_will_train_is_not_profiled_before_it_does(code: str, profiled: bool) -> None:
    net, seen = torch.nn.Linear(2, 2), list[bool]()
    with gpulab.profile("calls", show=False, save=False, code=code):
        for _ in range(3):
            net(torch.ones(1, 2))
            seen.append(torch._C._autograd._profiler_enabled())
    assert seen == [profiled] * 3


SESSION = """
import sys, torch, torch.profiler.profiler
from gpulab.capture.profiler import Window
window = Window("cpu")
window.start()
torch.ones(3) + 1
assert len(window.stop().timeline(0)) > 1
assert torch.profiler.profiler.torch is torch and hasattr(torch, "_inductor") is True
"""


def test_a_session_imports_nothing_within_the_loop(tmp_path: Path) -> None:
    code = SESSION.replace("assert len", "assert 'torch._inductor' not in sys.modules; assert len")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
