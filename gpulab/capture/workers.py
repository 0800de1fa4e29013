"""What goes wrong with a DataLoader's workers: one dies, or none can start because their code is in a notebook."""

from __future__ import annotations

import functools
import multiprocessing
import re
import signal
import sys
import types
from collections import deque
from contextlib import suppress
from typing import Any

from gpulab.run import Missing

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>\d+(?:, \d+)*)\) "
    r"(?P<how>is killed by signal: [^.\n]+|exited unexpectedly(?: with exit code \d+)?)"
)
_OBJECTS_LOOKED_AT = 200
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)  # pickled by their name
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")


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
        """What they did not give. `fed`: the run had batches; without a death it speaks against what was foretold."""
        foretold = self._cannot_start if self._death is not None or not fed else None
        return tuple(m for m in (self._death, foretold) if m is not None)


def death(error: str, iterator: Any = None) -> str | None:
    """Which worker died and how, where torch's message `error` tells of one; None for any other error.

    `iterator` is the DataLoader's, whose processes know more than the message.
    """
    said = _DEATH.search(error)
    if said is None:
        return None
    pids = [int(pid) for pid in said["pids"].split(", ")]
    codes = {w.pid: w.exitcode for w in getattr(iterator, "_workers", ())}
    known = [f"worker process {pid} {_how(codes[pid])}" for pid in pids if codes.get(pid) is not None]
    if known:
        return ", ".join(known)
    processes = "worker process" if len(pids) == 1 else "worker processes"
    return f"{processes} {said['pids']} {said['how'].removeprefix('is ')}"


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
    method = _start_method(loader)
    if method == "fork" or _main_can_be_imported():
        return None
    try:
        names = _defined_in_main(loader.dataset, loader.collate_fn, loader.worker_init_fn)
    except Exception:  # a user's object may refuse to be looked at
        return None
    if not names:
        return None
    return (
        f"the DataLoader's workers (start method {method}) will not find {', '.join(names)}: defined in a notebook, "
        "which they cannot import. Move it to a .py file and import it, or use num_workers=0"
    )


def _start_method(loader: Any) -> str:
    """How the workers will start. Leaves a default that is not yet fixed as it is."""
    context = getattr(loader, "multiprocessing_context", None)
    method: str | None = (context or multiprocessing).get_start_method(allow_none=True)
    return method or multiprocessing.get_all_start_methods()[0]


def _main_can_be_imported() -> bool:
    """What `multiprocessing.spawn` asks before it lets a worker import the main module."""
    main = sys.modules["__main__"]
    return (
        getattr(getattr(main, "__spec__", None), "name", None) is not None
        or getattr(main, "__file__", None) is not None
    )


def _defined_in_main(*roots: object) -> list[str]:
    """Classes and functions of `__main__` among the objects and what they hold, as far as pickle would follow."""
    waiting, found = deque(roots), dict[str, None]()
    for _ in range(_OBJECTS_LOOKED_AT):
        if not waiting:
            break
        thing = waiting.popleft()
        named = thing if isinstance(thing, _NAMED) else type(thing)
        if named.__module__ == "__main__":
            found[named.__qualname__] = None
        waiting += _held_by(thing)
    return list(found)


def _held_by(thing: object) -> list[object]:
    if isinstance(thing, _NAMED):
        return []
    if isinstance(thing, types.MethodType):
        return [thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args]
    if isinstance(thing, list | tuple):
        return list(thing[:_OBJECTS_LOOKED_AT])
    if any(getattr(type(thing), way) is not getattr(object, way) for way in _PICKLING):
        return []  # what it gives to pickle is its own affair
    return list(getattr(thing, "__dict__", {}).values())


__all__ = ["Workers", "cannot_start", "death"]
