"""What control groups leave to this process: the free memory, by the tightest of them."""

from __future__ import annotations

from pathlib import Path

import psutil

from gpulab.devices.cgroups import free_host_bytes


def test_free_memory_goes_by_the_cgroup(tmp_path: Path) -> None:
    def file(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert free_host_bytes(tmp_path) is None
    file("proc/self/cgroup", "0::/box\n5:memory:/box\n")
    file("sys/fs/cgroup/box/memory.max", "1000\n")
    file("sys/fs/cgroup/box/memory.current", "700\n")
    file("sys/fs/cgroup/box/memory.stat", "anon 500\ninactive_file 150\n")
    assert free_host_bytes(tmp_path) == 450
    file("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n")
    file("sys/fs/cgroup/memory/memory.usage_in_bytes", "1900\n")
    assert free_host_bytes(tmp_path) == 100
    file("sys/fs/cgroup/memory/memory.usage_in_bytes", "2900\n")
    assert free_host_bytes(tmp_path) == 0
    here = free_host_bytes()
    assert here is not None and 0 < here <= psutil.virtual_memory().total


def test_a_limit_without_usage_says_nothing_of_free_memory(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text("1000\n")
    assert free_host_bytes(tmp_path) is None
    (group / "memory.current").write_text("100\n")
    assert free_host_bytes(tmp_path) == 900
