"""Brings the spool of a run up to date once a second, in a thread of ours that wakes anyway, never the training's."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from gpulab.run import Choice
from gpulab.store.atomic_write import reason
from gpulab.store.folders import RUNNING_PREFIX, SPOOL_SUFFIX
from gpulab.store.spool import Spool

PERIOD_S = 1.0


class Spooler:
    """Of one run. `spool` is where its columns go, None: they stay in memory; `write` appends what is new.

    `look` may be called from any of our threads, as often as they wake; it never raises.
    """

    def __init__(self, spool: Spool | None, write: Callable[[Spool], None]) -> None:
        self._spool = spool
        self._write = write
        self._lock = threading.Lock()
        self._due_s = monotonic() + PERIOD_S
        self.problems: tuple[Choice, ...] = ()  # for the record: none, or one

    def look(self) -> None:
        """Write where a second has passed. After a failure the run goes on in memory."""
        if self._spool is None or self.problems or monotonic() < self._due_s:
            return
        if not self._lock.acquire(blocking=False):  # another thread writes
            return
        try:
            self._due_s = monotonic() + PERIOD_S
            self._write(self._spool)
        except Exception as e:
            why = f"they could not be written to {str(self._spool.path.parent)!r}: {reason(e)}"
            self.problems = (Choice("steps so far", "kept in memory", why),)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Remove the file, once all of it was read back."""
        with self._lock:
            if self._spool is not None:
                self._spool.close()


def about_process() -> dict[str, object]:
    """Whose file it is, for who finds it after a crash."""
    return {"process": os.getpid(), "host": socket.gethostname()}


def spool_path(root: Path, run_id: str) -> Path:
    """Hidden, so that no list of runs shows it."""
    return root / f"{RUNNING_PREFIX}{run_id}{SPOOL_SUFFIX}"
