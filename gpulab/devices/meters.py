"""Meters, a common way to read curves of a GPU, a program or a fake; and the meter of the process tree.

A meter returns one value per series and reading. A value that cannot be read is None, never 0. A series that fails when
the meter opens is not offered and is listed as missing. A series that starts to fail later is dropped after
`FAILURES_UNTIL_LOST` failed readings and listed as missing since the first failure. No reading ever raises.

The process tree is the profiled process with its children; loader workers that come and go are counted. CPU: user and
system time of every live process of the tree, between two readings, as a percentage of the usable cores (100 = all of
them busy). The last moments of a process that ended between two readings are not counted; a process found late counts
only the part that fell between the readings, as if it had worked evenly. Memory: resident set of the profiled process,
plus that of each child without its shared pages (files, shared memory). Anonymous pages a forked worker still shares
with its parent are in both: an upper bound. The exact figure (PSS) walks page tables and would hold up the training.

This module and the meters import neither NumPy nor torch, because the sampling process must start fast and stay small.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from gpulab.devices.own_processes import is_gpulabs
from gpulab.formatting import plural
from gpulab.live_feed import SeriesInfo

if TYPE_CHECKING:
    import psutil

FAILURES_UNTIL_LOST = 3


class Unavailable(Struct, frozen=True):
    """A series that cannot be read. `since_ns` (`time.perf_counter_ns`): since when; None: from the start."""

    what: str
    reason: str
    since_ns: int | None = None


class Failure(Struct, frozen=True):
    """A failed reading, with its reason."""

    reason: str


Answer = float | Failure | None  # None: nothing new this time
Reasoner = Callable[[Exception], str]


class Query:
    """One call that reads one or more series; their failures are counted separately."""

    def __init__(
        self, series: Sequence[SeriesInfo], ask: Callable[[], Sequence[Answer]], reason_of: Reasoner = str
    ) -> None:
        self.series = tuple(series)
        self._ask = ask
        self._reason_of = reason_of
        self._answered = [False] * len(self.series)
        self._failures = [0] * len(self.series)
        self._failing_since = [0] * len(self.series)
        self.lost: dict[int, Unavailable] = {}  # by position in `series`

    def opens(self) -> Unavailable | None:
        """Read once; returns the reason if the whole query fails."""
        try:
            answers = self._ask()
        except Exception as e:  # a refused query must not cost the others
            return Unavailable(self._what(), self._reason_of(e))
        failures = [a for a in answers if isinstance(a, Failure)]
        return Unavailable(self._what(), failures[0].reason) if len(failures) == len(self.series) else None

    def read(self) -> list[float | None]:
        """The values, None if there is none; a lost series is not read again."""
        if len(self.lost) == len(self.series):
            return [None] * len(self.series)
        try:
            answers = self._ask()
        except Exception as e:
            answers = [Failure(self._reason_of(e))] * len(self.series)
        return [self._take(i, answer) for i, answer in enumerate(answers)]

    def _take(self, i: int, answer: Answer) -> float | None:
        if i in self.lost or answer is None:
            return None
        if isinstance(answer, Failure):
            self._count(i, answer.reason)
            return None
        self._answered[i] = True
        self._failures[i] = 0
        return answer

    def _count(self, i: int, reason: str) -> None:
        if self._failures[i] == 0:
            self._failing_since[i] = time.perf_counter_ns()
        self._failures[i] += 1
        if self._failures[i] == FAILURES_UNTIL_LOST:
            since = self._failing_since[i] if self._answered[i] else None
            self.lost[i] = Unavailable(self.series[i].label, reason, since)

    def _what(self) -> str:
        return ", ".join(s.label for s in self.series)


class Meter:
    """An instrument made of queries: queries that fail at the start are missing, the others are read in turn.

    Used by one thread.
    """

    def __init__(
        self, queries: Sequence[Query], missing: Sequence[Unavailable] = (), close: Callable[[], None] | None = None
    ) -> None:
        reasons = [(q, q.opens()) for q in queries]
        self._queries = [q for q, why in reasons if why is None]
        self._unavailable = (*missing, *(why for _, why in reasons if why is not None))
        self._close = close

    def series(self) -> tuple[SeriesInfo, ...]:
        """The series, in the order of the values of `read`."""
        return tuple(s for q in self._queries for s in q.series)

    def read(self) -> list[float | None]:
        """One value per series; None if there is none this time."""
        return [value for q in self._queries for value in q.read()]

    def missing(self) -> tuple[Unavailable, ...]:
        """What cannot be read and why; grows when a series is lost during the run."""
        return (*self._unavailable, *(why for q in self._queries for why in q.lost.values()))

    def close(self) -> None:
        """Release the meter's resources. May be called twice."""
        close, self._close = self._close, None
        if close is not None:
            close()


DISCOVERY_SHARE = 0.01  # share of the time for the search for new children


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
    age_at_discovery_s: float | None  # its age when it was found


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
        self._users: set[int] = set()  # checked twice: right after a fork, a child still has gpulab's environment

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
        lifetime_s, member.age_at_discovery_s = member.age_at_discovery_s, None
        if lifetime_s is not None and interval_s is not None and lifetime_s > interval_s:
            used_s *= interval_s / lifetime_s
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
        self._users &= children
        users = {pid for pid in children if pid in self._users or not is_gpulabs(pid)}
        self._users |= users & self._members.keys()
        return users - {os.getpid()}

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
    """All descendants, from the lists that Linux keeps per thread: far cheaper than a scan of all processes.

    None if the system has no such lists (not Linux, or a kernel without CONFIG_PROC_CHILDREN).
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
            continue  # it ended meanwhile
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
