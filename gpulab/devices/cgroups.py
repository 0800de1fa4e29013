"""The cores and the memory that control groups (cgroups, version 1 and 2) grant this process.

`root` replaces "/" in each function (tests use a folder).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
UNLIMITED_BYTES = 2**60  # version 1 writes a huge number for "no limit"

_MEMORY = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))


def core_quotas(root: Path = ROOT) -> list[float]:
    """How many cores each group with a quota lets this process use at once."""
    return [quota for quota in (*_quotas_v2(root), *_quotas_v1(root)) if quota > 0]


def quota_periods(root: Path = ROOT) -> tuple[int, int] | None:
    """Periods of the CPU quota so far, and periods in which it ran out, for the group that is throttled most often.

    None if no group with a quota counts periods.
    """
    groups = (*_groups(root, ""), *_groups(root, "cpu"))
    counts = [(stat["nr_periods"], stat["nr_throttled"]) for folder in groups if (stat := _cpu_stat(folder))]
    return max((c for c in counts if c[0] > 0), key=lambda c: c[1], default=None)


def _cpu_stat(folder: Path) -> dict[str, int]:
    """The figures of a group's `cpu.stat`; empty if the group counts no periods."""
    words = (line.split() for line in (_text(folder / "cpu.stat") or "").splitlines())
    stat = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdigit()}
    return stat if {"nr_periods", "nr_throttled"} <= stat.keys() else {}


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The lowest memory limit of the groups; None without a limit."""
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def free_host_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process may still allocate: the free memory of the system, within the limits of its groups.

    Memory that a group counts as used but can drop at any time (file cache) is free. None if nothing can be read.
    """
    free = [limit - used for limit, used in _memory_limits(root) if used is not None]
    if root == ROOT:
        free += _free_in_the_system()
    return max(0, min(free)) if free else None


def _memory_limits(root: Path) -> Iterator[tuple[int, int | None]]:
    """The limit of each group with a limit, and its used memory that cannot be dropped (None: unreadable)."""
    for controller, limit_file, used_file in _MEMORY:
        for folder in _groups(root, controller):
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and 0 < limit < UNLIMITED_BYTES:
                yield limit, None if used is None else used - _droppable_bytes(folder)


def _droppable_bytes(folder: Path) -> int:
    stat = _text(folder / "memory.stat") or ""
    counts = dict(line.split(maxsplit=1) for line in stat.splitlines() if " " in line)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))


def _free_in_the_system() -> list[int]:
    try:
        import psutil

        return [int(psutil.virtual_memory().available)]
    except Exception:  # no psutil, or a system it does not know
        return []


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _groups(root, ""):
        words = (_text(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            yield int(words[0]) / int(words[1])


def _quotas_v1(root: Path) -> Iterator[float]:
    for folder in _groups(root, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period is not None:
            yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and its parents; controller "" is version 2.

    Inside a container the path may name a folder that exists only on the host: then the mount itself is used.
    """
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        for mount in _mounts(root, controllers):
            folder = mount / path.lstrip("/")
            while folder != mount and mount in folder.parents:
                yield folder
                folder = folder.parent
            yield mount


def _mounts(root: Path, controllers: str) -> Iterator[Path]:
    base = root / "sys/fs/cgroup"
    if controllers:
        yield from {base / name for name in (controllers, *controllers.split(","))}
    else:
        yield from (base, base / "unified")


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is missing or has no number ("max", -1)."""
    text = _text(path)
    return int(text) if text is not None and text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
