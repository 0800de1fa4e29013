"""What control groups leave to this process: the free memory, by the tightest of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from gpulab.devices.cgroups import free_host_bytes, memory_limit_bytes

V2, V1 = "sys/fs/cgroup/box/memory", "sys/fs/cgroup/memory/memory"
BOTH = {
    "proc/self/cgroup": "0::/box\n5:memory:/box\n",
    f"{V2}.max": "1000\n",
    f"{V2}.current": "700\n",
    f"{V2}.stat": "anon 500\ninactive_file 150\n",
}


def written(root: Path, files: Mapping[str, str]) -> Path:
    """The system's files, below another root."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (BOTH, 450),
        ({**BOTH, f"{V1}.limit_in_bytes": "2000\n", f"{V1}.usage_in_bytes": "1900\n"}, 100),
        ({**BOTH, f"{V1}.limit_in_bytes": "2000\n", f"{V1}.usage_in_bytes": "2900\n"}, 0),
        ({"proc/self/cgroup": "0::/box\n", f"{V2}.max": "1000\n"}, None),
        ({"proc/self/cgroup": "0::/box\n", f"{V2}.max": "1000\n", f"{V2}.current": "100\n"}, 900),
    ],
)
def test_free_memory_goes_by_the_cgroup(files: Mapping[str, str], free: int | None, tmp_path: Path) -> None:
    assert free_host_bytes(written(tmp_path, files)) == free
    here = free_host_bytes()
    assert here is not None and 0 < here <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("group", "limit_file", "text", "limit"),
    [
        ("", "", "", None),
        ("0::/box\n", f"{V2}.max", "max\n", None),
        ("0::/box\n", f"{V2}.max", "2147483648\n", 2**31),
        ("4:memory:/d\n", f"{V1}.limit_in_bytes", "1073741824", 2**30),
        ("4:memory:/\n", f"{V1}.limit_in_bytes", str(2**63 - 4096), None),
    ],
)
def test_memory_limit(group: str, limit_file: str, text: str, limit: int | None, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": group, limit_file: text} if group else {}
    assert memory_limit_bytes(written(tmp_path, files)) == limit
