"""Replaces attributes of torch, or of another library, for the length of a run, and puts the originals back.

`before_calls` only adds a callback: the call itself stays as it is.
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


# Replacements that ended below a later one: gpulab's function, the one it replaced, whether that was inherited.
_buried: list[tuple[Any, Any, bool]] = []


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `owner.name` by `make(original)`; at the end put the original back, unless other code replaced ours.

    If another of these contexts replaced ours, the context that ends last puts the original back.
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


def before_calls(owner: Any, name: str, callback: Callable[[Args, KeywordArgs], None]) -> AbstractContextManager[None]:
    """Call `callback(args, kwargs)` before each call of `owner.name` that this thread makes."""
    thread = get_ident()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                callback(args, kwargs)
            return original(*args, **kwargs)

        return wrapper

    return replaced(owner, name, wrap)


def remove_callback(callbacks: list[Any], ours: Any) -> None:
    """Remove our callback from a list that other code may have cleared."""
    with suppress(ValueError):
        callbacks.remove(ours)


class Hook:
    """A patch that is installed and removed repeatedly, until `close`. `install` makes its context. For any thread."""

    def __init__(self, install: Callable[[], AbstractContextManager[object]]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._undo = ExitStack()
        self._closed = False
        self.is_on = False

    def on(self) -> None:
        """Install the patch, unless the hook is closed."""
        with self._lock:
            if not (self.is_on or self._closed):
                self._undo.enter_context(self._install())
                self.is_on = True

    def off(self) -> None:
        with self._lock:
            self.is_on = False
            self._undo.close()

    def close(self) -> None:
        """Remove the patch for good."""
        with self._lock:
            self._closed = True
        self.off()


class Shared:
    """A patch with several users: the first one installs it, the last one removes it. From any thread."""

    def __init__(self, install: Callable[[ExitStack], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._undo = ExitStack()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keep the patch installed inside the block."""
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
    """Inside the block, a warning about a line of gpulab is shown at the user's line that led to it."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **kwargs: Any) -> None:
            if is_gpulabs_file(filename):
                frame = sys._getframe(1)
                while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
                    frame = frame.f_back
                if is_users_file(frame.f_code.co_filename):
                    filename, lineno = frame.f_code.co_filename, frame.f_lineno
            original(message, category, filename, lineno, *rest, **kwargs)

        return show

    return replaced(warnings, "showwarning", wrap)
