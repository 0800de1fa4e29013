"""The GPU of a run and the peak of its memory, where torch keeps one for the whole process. CUDA is scripted.

Cells that use another GPU than the first: name, memory and curves are those of the GPU that worked.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from gpulab.capture import gpu
from gpulab.capture.gpu import PeakMemory, count_anew, other_device, working_gpus
from gpulab.run import Category, Choice, Device, Memory, Missing, Samples, Series, Settings
from gpulab.tuning.code import Code
from gpulab.tuning.execute import Execution, Stopper, run_full
from tests.support.fake_cuda import FakeCuda
from tests.support.timelines import MAIN, OTHER_GPU, STREAM, STREAM_2, Span, timeline

GIB = 2**30
H100 = Device("cuda", "Fake H100", 0, memory_total_bytes=80 * GIB)
SECOND = Device("cuda", "Fake H100", 1, memory_total_bytes=80 * GIB)


def allocated_and_freed(fake: FakeCuda, gib: int, index: int = 0) -> None:
    block = fake.allocate(gib * GIB, index)
    del block
    gc.collect()


def peak_gib(watch: PeakMemory, device: Device = H100) -> tuple[float | None, tuple[Missing, ...]]:
    found, missing = watch.peaks(device, {})
    peak = found.peak_allocated_bytes
    return None if peak is None else peak / GIB, missing


@pytest.mark.parametrize(
    ("before", "held", "within", "peak"),
    [
        (0, 0, 10, 10),
        (10, 0, 12, 12),  # a second run that needs more than the process did
        (0, 10, 3, 10),  # it begins at the peak of the process
    ],
)
def test_a_run_at_the_peak_of_the_process_has_an_exact_one(
    fake_cuda: FakeCuda, before: int, held: int, within: int, peak: int
) -> None:
    fake_cuda.start()
    allocated_and_freed(fake_cuda, before)
    weights = [fake_cuda.allocate(held * GIB)]
    watch = PeakMemory()
    weights.clear()
    gc.collect()
    allocated_and_freed(fake_cuda, within)
    assert peak_gib(watch) == (peak, ())
    assert watch.peaks(H100, {"peak_rss_bytes": 5.0})[0] == Memory(peak * GIB, peak * GIB, 5, 80 * GIB)


def test_a_leaner_second_run_keeps_peaks_read_before_backward(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "APART_NS", 0)
    monkeypatch.setattr(gpu, "READING_SHARE", 1e9)
    fake_cuda.start()
    allocated_and_freed(fake_cuda, 10)
    watch = PeakMemory()
    weights = fake_cuda.allocate(2 * GIB)
    for activations in (3, 4, 3):
        block = fake_cuda.allocate(activations * GIB)
        watch.at_backward()
        del block
        gc.collect()
        watch.at_step()
    del weights
    peak, (missing,) = peak_gib(watch)
    assert peak == 6 and missing.key == "memory" and "exact" in missing.what and "10.0 GiB" in missing.reason
    assert torch.cuda.max_memory_allocated(0) == 10 * GIB, "the user's own peak is as it was"


def test_an_experiment_counts_each_run_anew_and_says_so(fake_cuda: FakeCuda) -> None:
    assert count_anew() is None and not fake_cuda.initialized, "no CUDA, nothing to tell"
    fake_cuda.start()
    allocated_and_freed(fake_cuda, 10)
    assert isinstance(count_anew(), Choice)
    watch = PeakMemory()
    allocated_and_freed(fake_cuda, 4)
    assert peak_gib(watch) == (4, ())


def test_readings_are_seldom(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    nested = torch.cuda.memory_stats_as_nested_dict

    def noted(index: int) -> dict[str, Any]:
        asked.append(index)
        return nested(index)

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", noted)
    now = [0]
    monkeypatch.setattr(gpu, "perf_counter_ns", lambda: now[0])
    fake_cuda.start()
    watch = PeakMemory()
    asked.clear()
    for _ in range(1000):
        now[0] += 100_000
        watch.at_backward()
        watch.at_step()
    assert len(asked) == 2 * 2 * 5, "0.1 s: five readings of two GPUs at each of two places"


def test_a_watch_makes_no_context_and_does_not_start_cuda(fake_cuda: FakeCuda) -> None:
    watch = PeakMemory()
    watch.at_step()
    peak, (missing,) = peak_gib(watch)
    assert peak is None and "never used" in missing.reason
    on_cpu = PeakMemory().peaks(Device("cpu", "CPU"), {"peak_rss_bytes": 7.0})
    assert on_cpu == (Memory(peak_rss_bytes=7), ())
    fake_cuda.start(1)
    watch.at_backward()
    allocated_and_freed(fake_cuda, 1, index=1)
    assert watch.busiest() == 1 and peak_gib(watch, SECOND) == (1, ())
    assert peak_gib(watch)[0] is None, "GPU 0 was not used: no peak of 0 bytes"
    assert fake_cuda.in_use == {1} and fake_cuda.contexts == [] and fake_cuda.started_by is None


def test_an_earlier_run_on_another_gpu_does_not_count(fake_cuda: FakeCuda) -> None:
    fake_cuda.start(0)
    allocated_and_freed(fake_cuda, 10, index=0)
    watch = PeakMemory()
    assert watch.busiest() is None
    allocated_and_freed(fake_cuda, 2, index=1)
    assert watch.busiest() == 1


def test_an_allocator_of_the_users_own_tells_nothing(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(index: int) -> dict[str, object]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", refuses)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", refuses)
    fake_cuda.start()
    watch = PeakMemory()
    watch.at_step()
    assert count_anew() is None and watch.busiest() is None
    peak, (missing,) = peak_gib(watch)
    assert peak is None and "allocator" in missing.reason
    assert gpu.gpu_peak_bytes(H100) == 0


def test_the_real_allocators_statistics_are_nested_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`memory_stats` flattens what the C extension gives: the real nesting, asked for one key."""
    of = ({"all": {"current": 1, "peak": 2}}, {"all": {"current": 3, "peak": 4}})
    nested = dict(zip(("allocated_bytes", "reserved_bytes"), of, strict=True))
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: nested)
    flat = torch.cuda.memory.memory_stats()
    read = gpu._reading(nested)
    assert read.allocated == flat["allocated_bytes.all.current"] == 1
    assert read.allocated_peak == flat["allocated_bytes.all.peak"] == 2
    assert read.reserved == flat["reserved_bytes.all.current"] == 3
    assert read.reserved_peak == flat["reserved_bytes.all.peak"] == 4


def test_a_full_run_of_an_experiment_has_its_own_peak(fake_cuda: FakeCuda) -> None:
    """Two arms in one process: the second one needs less."""
    fake_cuda.start()
    code = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    block = fake.allocate(size)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    del block
"""
    runs = []
    for gib in (10, 4):
        names = {"fake": fake_cuda, "size": gib * GIB}
        execution = Execution(Code.of_text(code, names))
        settings = Settings(live=False, save=False, trace=False, device="cpu")
        full_run = run_full(execution, settings, Stopper(), None, quiet=True)
        assert full_run.error is None
        runs.append(full_run.run)
        assert torch.cuda.max_memory_allocated(0) == gib * GIB
    assert all(any(c.value == "counted anew for each run" for c in run.choices) for run in runs)


FIRST = Device("cuda", "Fake H100", 0, "0000-0")


def curve(name: str, source: str) -> Series:
    return Series(name, "%", name, source, np.zeros(1, np.int64), np.zeros(1))


CURVES = Samples((curve("gpu_utilization_pct", "NVML"), curve("sm_active", "NVML GPM"), curve("cpu_pct", "psutil")))


def test_the_gpu_that_worked_longest_is_taken() -> None:
    one_long = Span("k", Category.KERNEL, OTHER_GPU, 0, 100, 1)
    many_at_once = [Span("k", Category.KERNEL, lane, 0, 60, 2) for lane in (STREAM, STREAM_2)]
    assert working_gpus(timeline([one_long, *many_at_once])) == [1, 0]
    assert working_gpus(timeline(many_at_once)) == [0]
    assert working_gpus(timeline([Span("aten::mm", Category.CPU_OP, MAIN, 0, 60)])) == []
    assert working_gpus(None) == []


def test_a_cell_on_the_second_gpu(fake_cuda: FakeCuda) -> None:
    watch = PeakMemory()
    fake_cuda.start(1)
    block = fake_cuda.allocate(2**30, index=1)
    found = other_device(FIRST, [watch.busiest() or 0], CURVES)
    assert found is not None
    device, curves, choice, (missing,) = found
    assert (device.index, device.uuid) == (1, "0000-1")
    assert [s.name for s in curves.series] == ["cpu_pct"]
    assert "GPU 1" in choice.value and "GPU 0" in missing.reason and missing.key == "curves"
    assert watch.peaks(device, {})[0].peak_allocated_bytes == block.size_bytes
    assert fake_cuda.contexts == []


@pytest.mark.parametrize(
    ("device", "worked"), [(FIRST, [0]), (FIRST, []), (FIRST, [1, 0]), (FIRST, [7]), (Device("cpu", "CPU"), [1])]
)
def test_the_device_that_stays(device: Device, worked: list[int], fake_cuda: FakeCuda) -> None:
    """The assumed one worked too, or torch sees no GPU of that number, or it is the CPU."""
    fake_cuda.start(0)
    assert other_device(device, worked, CURVES) is None
