"""The profiled process and its children as a meter, so that loader workers that come and go are counted.

CPU: user and system time of every live process of the tree, between two readings, as a percentage of the usable cores
(100 = all of them busy). The last moments of a process that ended between two readings are not counted; a process
found late counts only the part that fell between the readings, as if it had worked evenly.

Memory: resident set of the profiled process, plus that of each child without its shared pages (files, shared memory).
Anonymous pages a forked worker still shares with its parent are in both: an upper bound. The exact figure (PSS) walks
page tables and would hold up the training.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.devices.meters import Answer, Meter, Query, Unavailable
from gpulab.devices.own_processes import is_gpulabs
from gpulab.formatting import plural
from gpulab.live_feed import SeriesInfo

if TYPE_CHECKING:
    import psutil

DISCOVERY_SHARE = 0.01  # of the time may go into looking for new children


def host_meter(pid: int, usable_cores: float) -> Meter:
    """A meter for the tree of process `pid`, without the processes that gpulab starts for itself."""
    cores = plural(usable_cores, "usable core")
    series = (
        SeriesInfo("cpu_pct", "%", f"CPU of this program and its workers (100 % = {cores})", "psutil"),
        SeriesInfo("rss_bytes", "bytes", "memory of the process tree", "psutil"),
        SeriesInfo("process_count", "processes", "processes in the tree", "psutil"),
    )
    try:
        tree = _Tree(pid, usable_cores)
    except ImportError:
        return Meter([], [Unavailable("CPU and memory", "the package psutil is not installed")])
    except Exception as e:  # psutil.NoSuchProcess, AccessDenied
        return Meter([], [Unavailable("CPU and memory", _reason_of(e))])
    return Meter([Query(series, tree.ask, _reason_of)])


def _reason_of(error: Exception) -> str:
    import psutil

    if isinstance(error, psutil.NoSuchProcess):
        return "the profiled process ended"
    if isinstance(error, psutil.AccessDenied):
        return "the system does not let this process be read"
    return f"{type(error).__name__}: {error}"


class _Member(Struct):
    process: psutil.Process
    cpu_s: float
    new_since_s: float | None  # how long it had lived unseen when it was found


class _Tree:
    """The processes of the tree, each with its CPU time at the last reading."""

    def __init__(self, pid: int, usable_cores: float) -> None:
        import psutil

        self._psutil = psutil
        self._root = psutil.Process(pid)
        self._usable_cores = usable_cores
        self._most_pct = 100 * max((psutil.cpu_count() or 1) / usable_cores, 1)
        self._members: dict[int, _Member] = {pid: _Member(self._root, _cpu_s(self._root), None)}
        self._read_s: float | None = None
        self._next_discovery_s = 0.0
        self._judged: set[int] = set()  # seen twice: right after its start a child is a copy of us

    def ask(self) -> list[Answer]:
        """CPU %, bytes and number of processes. Raises NoSuchProcess when the profiled process is gone."""
        now_s = time.perf_counter()
        self._discover(now_s)
        interval_s = None if self._read_s is None else now_s - self._read_s
        self._read_s = now_s
        used_s, rss = 0.0, 0
        for pid, member in list(self._members.items()):
            try:
                with member.process.oneshot():
                    used_s += self._advance(member, interval_s)
                    memory = member.process.memory_info()
                    shared = 0 if member.process.pid == self._root.pid else getattr(memory, "shared", 0)
                    rss += int(max(memory.rss - shared, 0))
            except self._psutil.Error:
                if pid == self._root.pid:
                    raise
                del self._members[pid]
        return [self._pct(used_s, interval_s), float(rss), float(len(self._members))]

    def _pct(self, used_s: float, interval_s: float | None) -> float | None:
        if not interval_s:
            return None
        # CPU time comes in ticks of 10 ms, so one reading may exceed what the cores can do.
        return min(100 * used_s / interval_s / self._usable_cores, self._most_pct)

    def _advance(self, member: _Member, interval_s: float | None) -> float:
        cpu_s = _cpu_s(member.process)
        used_s, member.cpu_s = cpu_s - member.cpu_s, cpu_s
        unseen_s, member.new_since_s = member.new_since_s, None
        if unseen_s is not None and interval_s is not None and unseen_s > interval_s:
            used_s *= interval_s / unseen_s
        return used_s

    def _discover(self, now_s: float) -> None:
        if now_s < self._next_discovery_s:
            return
        children = children_of(self._root.pid)
        if children is None:
            children = {child.pid for child in self._root.children(recursive=True)}
        children = self._without_gpulabs(children)
        for pid in self._members.keys() - children - {self._root.pid}:
            del self._members[pid]
        for pid in children - self._members.keys():
            self._add(pid)
        cost_s = time.perf_counter() - now_s
        self._next_discovery_s = now_s + cost_s / DISCOVERY_SHARE

    def _without_gpulabs(self, children: set[int]) -> set[int]:
        self._judged &= children
        kept = {pid for pid in children if pid in self._judged or not is_gpulabs(pid)}
        self._judged |= kept & self._members.keys()
        return kept - {os.getpid()}

    def _add(self, pid: int) -> None:
        try:
            process = self._psutil.Process(pid)
            age_s = max(time.time() - process.create_time(), 0.0)
            cpu_before_s = 0.0 if self._read_s is not None else _cpu_s(process)
        except self._psutil.Error:
            return
        self._members[pid] = _Member(process, cpu_before_s, age_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def children_of(pid: int) -> set[int] | None:
    """All descendants, from the lists Linux keeps per thread: far cheaper than looking at every process.

    None where the system has no such lists (not Linux, or a kernel without CONFIG_PROC_CHILDREN).
    """
    descendants: set[int] = set()
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            direct = _direct_children(parent)
        except OSError:
            if parent == pid:
                return None
            continue  # it ended while we looked
        waiting += direct - descendants
        descendants |= direct
    return descendants


def _direct_children(pid: int) -> set[int]:
    direct: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as f:
                direct.update(int(child) for child in f.read().split())
        except FileNotFoundError:
            if thread == str(pid):
                raise
    return direct
