"""CPU time, waiting for a core, and the use of cores by other programs, as counted by the system.

Readings are running totals with an arbitrary zero: take differences. -1: unknown to the system. `root` replaces "/"
(tests use a folder). Workers of a DataLoader import this module, so it must stay light.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import get_native_id
from time import clock_gettime_ns, process_time_ns, thread_time_ns

from msgspec import Struct

from gpulab.devices.cgroups import ROOT, quota_periods
from gpulab.devices.meters import children_of
from gpulab.devices.own_processes import is_gpulabs

with suppress(ImportError):  # Windows
    import resource


OWN = "/proc/thread-self/schedstat"


class CoreWait:
    """Reads how long a thread was runnable without a core; Linux only."""

    def __init__(self, file: str = OWN) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> int:
        """The wait in ns since the thread began; -1: unknown."""
        return self.times()[1]

    def times(self) -> tuple[int, int]:
        """CPU time up to the system's last tick, and the wait for a core, in ns; -1: unknown."""
        if self._file < 0:
            return -1, -1
        try:
            cpu, wait, *_ = os.pread(self._file, 64, 0).split()
            return int(cpu), int(wait)
        except (OSError, ValueError):
            return -1, -1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def voluntary_switches() -> int:
    """How often the calling thread has blocked: on a disk, a lock, a network, a sleep. -1: unknown."""
    try:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    except (NameError, AttributeError):  # not Linux
        return -1


_BUSY = (0, 1, 2, 5, 6, 7)  # columns of a "cpu" line of /proc/stat: user, nice, system, irq, softirq, steal
_STEAL = 7
_CHILDREN_ENDED = slice(13, 15)  # of /proc/PID/stat behind the name: CPU time of children that ended, in ticks
_PROCESS_CLOCK = 2  # low bits of Linux's clock id of a process's CPU time; the other bits are its inverted pid


class ThreadClock:
    """CPU time and wait for a core of a thread (the calling one or one of another process), and CPU time of its
    process.

    Another process works on Linux only, and its CPU time may lag by a tick (about 4 ms). Raises OSError elsewhere.
    """

    def __init__(self, pid: int = 0, thread: int = 0) -> None:
        self._pid = pid
        self._wait = CoreWait(f"/proc/{pid}/task/{thread}/schedstat" if pid else OWN)

    def read(self) -> tuple[int, int, int]:
        """The three times in ns. Costs 2 µs, 4 µs for another process. Raises OSError if that process has ended."""
        cpu_ns, wait_ns = self._wait.times()
        if not self._pid:
            return thread_time_ns(), wait_ns, process_time_ns()
        if wait_ns < 0:
            raise ProcessLookupError(f"thread of process {self._pid}: not known")
        return cpu_ns, wait_ns, process_cpu_ns(self._pid)

    def close(self) -> None:
        self._wait.close()


def process_cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, including ended threads, in ns. Raises OSError if it cannot be read."""
    return process_time_ns() if pid == os.getpid() else clock_gettime_ns(~pid << 3 | _PROCESS_CLOCK)


def _ended_children_ns(pid: int) -> int:
    if pid == os.getpid():
        ended = os.times()
        return int((ended.children_user + ended.children_system) * 1e9)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[_CHILDREN_ENDED])) * 10**9 // os.sysconf("SC_CLK_TCK")


class MachineReading(Struct, frozen=True):
    """Running totals over all cores that this process may use, in ns, except the two counts of periods.

    `tree_cpu_ns`: CPU time of this process and its children, without gpulab's own. `others_cpu_ns`: CPU time of all
    other programs, and the time that the host of a virtual machine took (`stolen_ns`). `pool_wait_ns`: time in which
    threads of this process other than the training thread were ready without a core, summed over threads;
    `workers_wait_ns`: the same for its children. `pressure_ns`: time in which some program of the machine, or of the
    control group, waited for a core. `quota_periods`: periods of the control group's CPU quota; `throttled_periods`:
    those in which the quota ran out.
    """

    tree_cpu_ns: int
    others_cpu_ns: int
    stolen_ns: int
    pool_wait_ns: int
    workers_wait_ns: int
    pressure_ns: int
    quota_periods: int
    throttled_periods: int


class MachineClock:
    """Reads the machine for the training process `pid` and its `thread`; by default, the calling process and thread."""

    def __init__(self, root: Path = ROOT, *, pid: int = 0, thread: int = 0) -> None:
        self._root = root
        self._pid, self._tid = pid or os.getpid(), thread or get_native_id()
        self._waits: dict[tuple[int, int], int] = {}  # the latest wait, by process and thread
        self._pool_wait_ns = self._workers_wait_ns = 0
        self._ours: dict[int, bool] = {}  # by child process: whether gpulab started it

    def read(self) -> MachineReading:
        """The totals. Costs about 20 µs, and 10 µs per thread or child. Raises OSError if process `pid` has ended."""
        workers_ns, gpulabs_ns = self._children()
        self._note(self._pid)
        tree_ns = process_cpu_ns(self._pid) + _ended_children_ns(self._pid) + workers_ns
        busy_ns, stolen_ns = busy_time_ns(self._root)
        periods, throttled = quota_periods(self._root) or (-1, -1)
        return MachineReading(
            tree_cpu_ns=tree_ns,
            others_cpu_ns=busy_ns - tree_ns - gpulabs_ns if busy_ns >= 0 else -1,
            stolen_ns=stolen_ns,
            pool_wait_ns=self._pool_wait_ns,
            workers_wait_ns=self._workers_wait_ns,
            pressure_ns=pressure_ns(self._root),
            quota_periods=periods,
            throttled_periods=throttled,
        )

    def _children(self) -> tuple[int, int]:
        """CPU time of the user's live child processes, and of gpulab's, in ns."""
        children = children_of(self._pid) or set()
        workers_ns = gpulabs_ns = 0
        for pid in children:
            if self._ours.setdefault(pid, is_gpulabs(pid)):
                gpulabs_ns += sum(cpu for _, cpu, _ in threads_of(pid))
            else:
                workers_ns += self._note(pid)
        return workers_ns, gpulabs_ns

    def _note(self, pid: int) -> int:
        """Add the wait of the process's threads since the last reading. Returns their CPU time so far."""
        used_ns = 0
        for thread, cpu_ns, wait_ns in threads_of(pid):
            used_ns += cpu_ns
            longer_ns = max(0, wait_ns - self._waits.get((pid, thread), 0))
            self._waits[pid, thread] = wait_ns
            if pid != self._pid:
                self._workers_wait_ns += longer_ns
            elif thread != self._tid:
                self._pool_wait_ns += longer_ns
        return used_ns


def threads_of(pid: int) -> list[tuple[int, int, int]]:
    """For each thread of a process: its id, CPU time and wait for a core, in ns; empty if unknown."""
    folder = f"/proc/{pid}/task"
    rows: list[tuple[int, int, int]] = []
    with suppress(OSError):  # the process has ended
        for thread in os.listdir(folder):
            with suppress(OSError, ValueError), open(f"{folder}/{thread}/schedstat", "rb") as file:
                cpu, wait, *_ = file.read().split()
                rows.append((int(thread), int(cpu), int(wait)))
    return rows


def busy_time_ns(root: Path = ROOT) -> tuple[int, int]:
    """Busy time, by any program, of the cores that this process may use, and the stolen part of that time."""
    try:
        lines = (root / "proc/stat").read_text().splitlines()
        cores = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        rows = [[int(x) for x in line.split()[1:]] for line in lines if line.partition(" ")[0] in cores]
        tick_ns = 10**9 // os.sysconf("SC_CLK_TCK")
        busy = sum(row[i] for row in rows for i in _BUSY) * tick_ns
        return (busy, sum(row[_STEAL] for row in rows) * tick_ns) if rows else (-1, -1)
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux, or an unexpected format
        return -1, -1


def pressure_ns(root: Path = ROOT) -> int:
    """Time in which some program was ready without a core, from the kernel's pressure stall information (PSI)."""
    try:
        words = (root / "proc/pressure/cpu").read_text().split()
        return int(words[words.index("some") + 4].removeprefix("total=")) * 1000
    except (OSError, ValueError, IndexError):  # a kernel without PSI
        return -1
