"""Whether a look at a thread is a fair draw of its time: not where the looker had to wait until the thread stood still.

On a machine whose cores are all taken, the one who looks gets a core when somebody leaves it, and a program leaves
one by itself at its calls of the system: there it would be seen too often. So a look counts where the thread runs
meanwhile, on another core; where its core was taken from it, which may happen at any instruction, and it has left none
by itself since the look before; or where it is blocked, and has not made room for the look by that. Linux tells how
often a thread got a core, and how often it lost one and how: while it runs, these differ by one.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

IN_TIME_S = 0.0005  # after it was due: so soon no look has waited for anybody
_SWITCHES = re.compile(rb"^(nonvoluntary|voluntary)_ctxt_switches:\s*(\d+)", re.MULTILINE)
_STATE = re.compile(rb"^State:\s*(\w)", re.MULTILINE)
_READY = b"R"
_CORE_FIELD = 36  # of stat, after the name


class OnCore:
    """Of one thread, `task`, of a process. Raises OSError where the system does not tell."""

    def __init__(self, process: int, task: int) -> None:
        folder = f"/proc/{process}/task/{task}"
        self._files = [
            os.open(f"{folder}/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("schedstat", "status", "stat")
        ]
        self._own = os.open("/proc/thread-self/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._arrivals = 0
        self._left = -1  # how often it had left a core by itself, at the look before
        self._cores = os.sched_getaffinity(process)

    def begin(self) -> None:
        """A look begins."""
        self._arrivals = int(os.pread(self._files[0], 128, 0).split()[2])

    def is_fair(self, late_s: float) -> bool:
        """The look is over; it began so much after it was due."""
        status = os.pread(self._files[1], 8192, 0)
        switches = {how: int(count) for how, count in _SWITCHES.findall(status)}
        before, self._left = self._left, switches.get(b"voluntary", -1)
        if self._arrivals > sum(switches.values()):
            return True
        elsewhere = self._is_elsewhere()
        state = _STATE.search(status)
        if state is None:
            return False
        if state[1] == _READY:
            return before == self._left >= 0
        return elsewhere or late_s <= IN_TIME_S

    def _is_elsewhere(self) -> bool:
        """Whether the thread's core is another one than ours; else leave it."""
        core = _core(self._files[2])
        if core != _core(self._own):
            return True
        others = self._cores - {core}
        if others:
            with suppress(OSError):
                os.sched_setaffinity(0, others)
        return False

    def close(self) -> None:
        for file in (*self._files, self._own):
            with suppress(OSError):
                os.close(file)


def _core(file: int) -> int:
    return int(os.pread(file, 1024, 0).rpartition(b")")[2].split()[_CORE_FIELD])
