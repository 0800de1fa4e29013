"""Replacing an attribute of torch for the length of a run: the usual way in which we touch what is not ours.

Who only wants to hear of a call uses `heard_before`, which passes the call through as it is.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from threading import get_ident
from typing import Any

from gpulab.user_code import is_gpulabs_file, is_users_file

Args = tuple[Any, ...]
KeywordArgs = dict[str, Any]


_buried: list[tuple[Any, Any, bool]] = []  # replaced once more when they ended: function, what it replaced, inherited


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(original)`; put the original back unless somebody replaced ours meanwhile.

    Where that was another of these contexts, whichever ends last puts the original back.
    """
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    ours = make(original)
    setattr(owner, name, ours)
    try:
        yield
    finally:
        if vars(owner).get(name) is ours:
            while (below := next((buried for buried in _buried if buried[0] is original), None)) is not None:
                _buried.remove(below)
                _, original, inherited = below
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        else:
            _buried.append((ours, original, inherited))


def heard_before(owner: Any, name: str, hear: Callable[[Args, KeywordArgs], None]) -> AbstractContextManager[None]:
    """Call `hear(args, kwargs)` before each call of `owner.name` on this thread."""
    thread = get_ident()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def heard(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                hear(args, kwargs)
            return original(*args, **kwargs)

        return heard

    return replaced(owner, name, wrap)


def remove_callback(callbacks: list[Any], ours: Any) -> None:
    """Take ours out of a list of callbacks, which somebody may have cleared."""
    with suppress(ValueError):
        callbacks.remove(ours)


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


def warnings_at_users_line() -> AbstractContextManager[None]:
    """Inside, a warning about a line of gpulab's is shown as one about the user's line that led there."""

    def wrap(shown: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **named: Any) -> None:
            if is_gpulabs_file(filename):
                frame = sys._getframe(1)
                while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
                    frame = frame.f_back
                if is_users_file(frame.f_code.co_filename):
                    filename, lineno = frame.f_code.co_filename, frame.f_lineno
            shown(message, category, filename, lineno, *rest, **named)

        return show

    return replaced(warnings, "showwarning", wrap)
