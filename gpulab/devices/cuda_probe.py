"""CUDA asked in a process of its own, so that the user's process stays as it was.

The process writes one JSON object as its last line: `{"gpus": [...]}`, or `{"kernels": n}`. Whatever CUDA and CUPTI
complain about is on its standard error.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from gpulab.devices.cuda_visible_devices import Gpu
from gpulab.devices.own_processes import import_path, marked
from gpulab.formatting import plain_values

if TYPE_CHECKING:
    import subprocess

TIMEOUT_S = 60.0  # importing PyTorch from a slow disk takes most of it
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd", "/dev/dxg")  # NVIDIA, Jetson, AMD, WSL
DECIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
LAUNCHED = 64  # in a trial: CUPTI of CUDA 12.6 to 13.0 loses a few at a session's start (pytorch#192021)

Question = Literal["gpus", "kernels"]
_BOOTSTRAP = """
import json, sys
question, sys.path[:] = sys.argv[1], json.loads(sys.argv[2])
from gpulab.devices.cuda_probe import answer
answer(question)
"""
_CUPTI_LINE = re.compile(r"^.*(?:CUPTI|[Ii]nsufficient [Pp]rivilege).*$", re.MULTILINE)
_LOG_PREFIX = re.compile(r"^(?:\[[^\]]*\]|\w+:\S+ \S+ \S+ \S+\]|\s)+")


class ProbeResult(Struct, frozen=True):
    """What came of `LAUNCHED` small profiled kernels: how many came back, or why none did."""

    kernels: int
    reason: str = ""


def gpus() -> list[Gpu]:
    """The GPUs as PyTorch numbers them; none where no device file hints at one. Takes seconds, once."""
    if not any(map(os.path.exists, DEVICE_FILES)):
        return []
    return list(_gpus(tuple(os.environ.get(name) for name in DECIDING)))


@functools.cache
def _gpus(deciding: tuple[str | None, ...]) -> tuple[Gpu, ...]:
    done = ask("gpus")
    rows = _last_object(done.stdout).get("gpus") if done is not None else None
    return tuple(Gpu(**row) for row in rows) if isinstance(rows, list) else ()


def try_tracing() -> ProbeResult:
    """Profile small kernels and see how many come back. Takes seconds."""
    return verdict(ask("kernels"))


def verdict(done: subprocess.CompletedProcess[str] | None) -> ProbeResult:
    """What the process's answer says; None is one that did not end in time."""
    if done is None:
        return ProbeResult(0, f"the trial did not end within {TIMEOUT_S:g} s")
    kernels = _last_object(done.stdout).get("kernels")
    if isinstance(kernels, int) and kernels > 0:
        return ProbeResult(kernels)
    complaint = _CUPTI_LINE.search(done.stderr)
    if complaint is not None:
        return ProbeResult(0, _LOG_PREFIX.sub("", complaint[0]).strip())
    if kernels == 0:
        return ProbeResult(0, "a kernel ran and did not come back")
    if done.returncode < 0:
        return ProbeResult(0, f"the trial was ended by signal {-done.returncode}")
    lines = done.stderr.strip().splitlines()
    return ProbeResult(0, lines[-1].strip() if lines else f"the trial ended with exit code {done.returncode}")


def ask(question: Question) -> subprocess.CompletedProcess[str] | None:
    """Start a Python like ours, let it answer; None where it does not end in time."""
    import subprocess

    command = [sys.executable, "-P", "-c", _BOOTSTRAP, question, json.dumps(import_path())]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S,
            check=False, env=marked(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None


def answer(question: Question) -> None:
    """The process's own part: write the answer."""
    print(json.dumps({"gpus": plain_values(_own_gpus())} if question == "gpus" else {"kernels": _kernels()}))


def _own_gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [described(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]


def described(properties: Any) -> Gpu:
    """A GPU as `torch.cuda.get_device_properties` gives it; a PyTorch before 2.5 knows no UUID."""
    uuid = getattr(properties, "uuid", None)
    return Gpu(
        name=properties.name,
        uuid=None if uuid is None else str(uuid),
        memory_total_bytes=properties.total_memory,
        sm_count=properties.multi_processor_count,
        compute_capability=f"{properties.major}.{properties.minor}",
    )


def _kernels() -> int:
    """Profile small kernels, count those that the device reports."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    ones = torch.ones(256, 256, device="cuda")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(LAUNCHED):
            ones = ones + 1
        torch.cuda.synchronize()
    return kernels_among(profiler.events() or ())


def kernels_among(events: Iterable[Any]) -> int:
    """How many of torch's profiler events are kernels of a GPU: no copies, and no waits, which some versions record."""
    on_device = (event.name for event in events if event.device_type.name == "CUDA")
    return sum(not name.startswith("Mem") and "Sync" not in name for name in on_device)


def _last_object(text: str) -> dict[str, object]:
    lines = text.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
