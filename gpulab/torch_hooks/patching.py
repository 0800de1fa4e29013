"""Replacing an attribute of torch for the length of a run: the one way in which we touch what is not ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(original)`; put the original back unless somebody replaced ours meanwhile."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    ours = make(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class Shared:
    """One patch for all who need it at a time: the first installs it, the last takes it out. From any thread."""

    def __init__(self, install: Callable[[ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._undo = ExitStack()

    @contextmanager
    def held(self) -> Iterator[None]:
        """The patch is there."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo = ExitStack()
                self._install(self._undo)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._undo.close()
