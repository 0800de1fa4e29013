"""What goes wrong with a DataLoader's workers: one dies, or none can start because their code is in a notebook."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from gpulab.knobs.observe.describe import defined_in_main, main_can_be_imported, start_method
from gpulab.run import Missing

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, \d+)*)\) "
    r"(?P<how>is killed by signal: [^.\n]+|exited unexpectedly(?: with exit code \d+)?)"
)


class Workers:
    """What a run learns of its DataLoaders' workers. Times are ns since the run began."""

    def __init__(self) -> None:
        self._cannot_start: Missing | None = None
        self._death: Missing | None = None

    def meet(self, loader: Any, now_ns: int) -> None:
        """A loader is about to make an iterator: say so, once, where its workers cannot start."""
        why = cannot_start(loader) if self._cannot_start is None else None
        if why is None:
            return
        self._cannot_start = Missing("data from the DataLoader's workers", why, now_ns, "workers")
        with suppress(OSError, ValueError, AttributeError):  # a standard error that is closed or not there
            sys.stderr.write(f"gpulab: {why}.\n")

    def fail(self, error: str, now_ns: int, iterator: Any = None) -> None:
        """Something failed with this error: perhaps a worker died. The first death counts."""
        how = death(error, iterator) if self._death is None else None
        if how is not None:
            self._death = Missing("data from a DataLoader worker", how, now_ns, "loader")

    def missing(self, *, fed: bool) -> tuple[Missing, ...]:
        """What they did not give. `fed`: the run had batches; without a death it speaks against what was predicted."""
        predicted = self._cannot_start if self._death is not None or not fed else None
        return tuple(m for m in (self._death, predicted) if m is not None)


@contextmanager
def deaths_unheard() -> Iterator[None]:
    """Inside, torch does not raise that a worker died: it would do so in the middle of our own work.

    Its handler looks after all workers, those of earlier cells too, whenever any child process ends, and ours does at
    the end of a run. A loader that lacks a worker says so itself at its next batch.
    """
    heard = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    if not callable(heard) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            heard(number, frame)
        except RuntimeError as e:
            if death(str(e)) is None:
                raise

    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is handle:
            signal.signal(signal.SIGCHLD, heard)


def death(error: str, iterator: Any = None) -> str | None:
    """Which worker died and how, where torch's message `error` tells of one; None for any other error.

    `iterator` is the DataLoader's, whose processes know more than the message.
    """
    match = _DEATH.search(error)
    if match is None:
        return None
    pids = [int(pid) for pid in match["pids"].split(", ")]
    codes = {w.pid: w.exitcode for w in getattr(iterator, "_workers", ())}
    ends = [f"worker process {pid} {_how(codes[pid])}" for pid in pids if codes.get(pid) is not None]
    if ends:
        return ", ".join(ends)
    processes = "worker process" if len(pids) == 1 else "worker processes"
    return f"{processes} {match['pids']} {match['how'].removeprefix('is ')}"


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {s.value: s.name for s in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


def cannot_start(loader: Any) -> str | None:
    """Why the workers that a DataLoader is about to start will not get its data; None where nothing speaks against it.

    A worker that is not forked imports what it needs by name, and finds nothing of a notebook: there `__main__` is no
    file. Looks from the outside, starts and pickles nothing.
    """
    if not getattr(loader, "num_workers", 0) or getattr(loader, "_iterator", None) is not None:
        return None
    method = start_method(loader)
    if method == "fork" or main_can_be_imported():
        return None
    try:
        names = defined_in_main(loader)
    except Exception:  # a user's object may refuse to be looked at
        return None
    if not names:
        return None
    return (
        f"the DataLoader's workers (start method {method}) will not find {', '.join(names)}: defined in a notebook, "
        "which they cannot import. Move it to a .py file and import it, or use num_workers=0"
    )
