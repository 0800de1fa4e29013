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


@pytest.mark.parametrize(
    ("device", "worked"), [(FIRST, [0]), (FIRST, []), (FIRST, [1, 0]), (FIRST, [7]), (Device("cpu", "CPU"), [1])]
)
def test_the_device_that_stays(device: Device, worked: list[int], fake_cuda: FakeCuda) -> None:
    """The assumed one worked too, or torch sees no GPU of that number, or it is the CPU."""
    fake_cuda.start(0)
    assert moved(device, worked, CURVES) == Moved(device, CURVES)
