"""How much memory a process may still take, by the tightest limit; and what a failing call asked for, by its words."""

from __future__ import annotations

import json
import mmap
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from gpulab.devices import cgroups
from gpulab.memory import failure, room
from gpulab.memory.failure import explain, memory_error, out_of_memory, request_bytes
from gpulab.memory.owners import Root
from gpulab.memory.peak import peak_of
from gpulab.memory.room import pool_from, room_of
from gpulab.memory_record import Pool, Room

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.25 GiB of which 1.06 GiB is free."
    " Including non-PyTorch memory, this process has 78.18 GiB memory in use. Of the allocated memory 70.11 GiB is "
    "allocated by PyTorch, and 7.50 GiB is reserved by PyTorch but unallocated."
)
TORCH_CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4294967296000 bytes. Error code 12 (Cannot allocate memory)"
)
IN_A_CHILD = """
import json, resource, sys
import torch
from gpulab.memory.failure import memory_error, request_bytes
from gpulab.memory.room import room_of, status_bytes
before = status_bytes("VmSize")
resource.setrlimit(resource.RLIMIT_AS, (before + (256 << 20), resource.RLIM_INFINITY))
room = room_of(None)
x = torch.ones(32 << 20)
after = room_of(None)
del x
answers = {"limit": room.limit, "free": room.free_bytes, "took": room.free_bytes - after.free_bytes, "errors": []}
answers["fits"] = torch.ones(int(0.9 * room.free_bytes) // 4).numel()
for work in (lambda: torch.empty(1 << 29), lambda: __import__("numpy").ones(1 << 28), lambda: bytearray(1 << 31)):
    try:
        work()
    except Exception as e:
        answers["errors"].append([type(e).__name__, memory_error(e) is e, request_bytes(str(e))])
print(json.dumps(answers))
"""


def test_the_room_below_a_limit_of_address_space() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_CHILD], capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    assert answers["limit"] == "RLIMIT_AS" and 256 << 20 <= answers["free"] <= 300 << 20
    assert answers["took"] == pytest.approx(128 << 20, rel=0.1) and answers["fits"]
    assert answers["errors"] == [
        ["RuntimeError", True, 1 << 31],
        ["MemoryError", True, 1 << 31],
        ["MemoryError", True, None],
    ]


@pytest.mark.parametrize(("share", "limit"), [(0.5, "control group"), (None, "machine"), (2.0, "machine")])
def test_the_room_in_a_control_group(
    share: float | None, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = psutil.virtual_memory()
    folder = tmp_path / "sys/fs/cgroup/box"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    if share is not None:
        total = int(share * machine.available)
        (folder / "memory.max").write_text(f"{total}\n")
        (folder / "memory.current").write_text(f"{total // 2}\n")
    monkeypatch.setattr(room, "free_host_bytes", lambda: cgroups.free_host_bytes(tmp_path) or machine.available)
    monkeypatch.setattr(room, "memory_limit_bytes", lambda: cgroups.memory_limit_bytes(tmp_path))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    here = room_of(None)
    assert here is not None and here.limit == limit
    if limit == "control group":
        assert share is not None
        assert here == Room(total - total // 2, total, limit)


def test_no_room_where_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise OSError("no such file")

    monkeypatch.setattr(room, "free_host_bytes", broken)
    assert room_of(None) is None and room_of(0) is None and room.pool_of(0) is None


def test_the_pool_of_an_allocator() -> None:
    def segment(device: int, *blocks: tuple[int, str]) -> dict[str, Any]:
        return {"device": device, "blocks": [{"size": size, "state": state} for size, state in blocks]}

    stats = {"allocated_bytes.all.current": 600, "reserved_bytes.all.current": 1000, "num_alloc_retries": 3}
    segments = [
        segment(0, (400, "active_allocated"), (100, "inactive"), (200, "active_pending_free"), (90, "inactive")),
        segment(0, (210, "inactive")),
        segment(1, (5000, "inactive")),
    ]
    assert pool_from(stats, segments, 0) == Pool(600, 1000, 210, 3)
    assert pool_from(stats, segments, 2) == Pool(600, 1000, 0, 3)
    assert pool_from({key: 1 for key in stats if "bytes" in key}, [], 0) == Pool(1, 1, 0, 0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (CUDA, 2 << 30),
        (TORCH_CPU, 4294967296000),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity)", 20 << 20),
        ("HIP out of memory. Tried to allocate 512 bytes.", 512),
        ("Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64", 7999426560),
        ("Unable to allocate 381. MiB for an array with shape (100000000,) and data type float32", 381 << 20),
        ("CUDA error: out of memory", None),
        ("", None),
    ],
)
def test_what_a_failing_call_asked_for(text: str, count: int | None) -> None:
    asked = request_bytes(text)
    assert asked == (None if count is None else pytest.approx(count, rel=0.002))
    assert not text or out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    ("error", "yes"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("could not create a primitive"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt("out of memory"), False),
        (None, False),
    ],
)
def test_errors_that_mean_memory_ran_out(error: BaseException | None, yes: bool) -> None:
    assert out_of_memory(error) is yes


def test_an_unclear_error_means_memory_where_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, yes in ((1 << 20, True), (1 << 30, False)):
        monkeypatch.setattr(failure, "room_of", lambda gpu, free=free: Room(free, 1 << 40, "RLIMIT_AS"))
        assert out_of_memory(RuntimeError("could not create a primitive")) is yes


def test_a_cause_or_a_context_and_a_circle_of_them() -> None:
    inner, outer, wrong = MemoryError("x"), RuntimeError("wrapped"), ValueError("no")
    outer.__cause__ = inner
    assert memory_error(outer) is inner and memory_error(wrong) is None
    a, b = ValueError("a"), ValueError("b")
    a.__context__, b.__context__ = b, a
    assert memory_error(a) is None
    b.__cause__ = inner
    assert memory_error(a) is inner


def test_the_account_of_a_failure_names_the_dead_calls() -> None:
    names: dict[str, Any] = {"torch": torch, "model": torch.nn.Linear(300, 300)}
    code = "def step():\n    batch = torch.ones(200_000)\n    raise MemoryError\n"
    exec(compile(code, "<cell>", "exec"), names)
    with pytest.raises(MemoryError) as caught:
        names["step"]()
    stages = [[Root("model", names["model"])], [Root("traceback", caught.tb, "traceback")]]
    account = explain(RuntimeError(CUDA).with_traceback(caught.tb), 3, "line 2", stages, ())
    assert (account.device, account.request_bytes, account.steps, account.holdings) == ("cuda:1", 2 << 30, 3, ())
    account = explain(caught.value, 3, "line 2", stages, ())
    assert (account.device, account.request_bytes, account.pool) == ("cpu", None, None) and account.room is not None
    owners = {holding.owner: (holding.kind, holding.bytes) for holding in account.holdings}
    assert owners["traceback: batch in step()"] == ("variables", 800_000)
    assert owners["model.weight"][0] == "parameters"


def _touch(count: int) -> None:
    """Take so many bytes from the system and give them back; `malloc` might have some of its own."""
    with mmap.mmap(-1, count) as fresh:
        for _ in range(count >> 20):
            fresh.write(b"x" * (1 << 20))


def test_the_peak_from_a_moment_on() -> None:
    _touch(64 << 20)
    with peak_of(None) as peak:
        peak.reset()
        before = peak.bytes
        _touch(32 << 20)
        after = peak.bytes
    if before is not None and after is not None:  # elsewhere than on Linux there is none
        assert after - before == pytest.approx(32 << 20, abs=4 << 20)
