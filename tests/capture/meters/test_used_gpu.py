"""Cells that use another GPU than the first: name, memory and curves are those of the GPU that worked."""

from __future__ import annotations

import numpy as np
import pytest

from gpulab.capture.meters.memory_peaks import PeakWatch
from gpulab.capture.meters.used_gpu import Moved, moved, working_gpus
from gpulab.run import Category, Device, Samples, Series
from tests.support.fake_cuda import FakeCuda
from tests.support.timelines import MAIN, OTHER_GPU, STREAM, STREAM_2, Span, timeline

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
    watch = PeakWatch()
    fake_cuda.start(1)
    block = fake_cuda.allocate(2**30, index=1)
    found = moved(FIRST, [watch.busiest() or 0], CURVES)
    assert (found.device.index, found.device.uuid) == (1, "0000-1")
    assert [s.name for s in found.samples.series] == ["cpu_pct"]
    (choice,), (missing,) = found.choices, found.missing
    assert "GPU 1" in choice.value and "GPU 0" in missing.reason and missing.key == "curves"
    assert watch.peaks(found.device, {})[0].peak_allocated_bytes == block.size_bytes
    assert fake_cuda.contexts == []


@pytest.mark.parametrize("worked", [[0], [], [1, 0]])
def test_the_assumed_gpu_stays_where_it_worked_too(worked: list[int], fake_cuda: FakeCuda) -> None:
    fake_cuda.start(0)
    assert moved(FIRST, worked, CURVES) == Moved(FIRST, CURVES)


def test_a_gpu_that_torch_does_not_see_changes_nothing(fake_cuda: FakeCuda) -> None:
    fake_cuda.start(0)
    assert moved(FIRST, [7], CURVES) == Moved(FIRST, CURVES)


def test_a_run_on_the_cpu_stays_there() -> None:
    cpu = Device("cpu", "CPU")
    assert moved(cpu, [1], CURVES) == Moved(cpu, CURVES)
