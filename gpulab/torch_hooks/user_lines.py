"""A library's warning points at who called it. Where that is a hook of gpulab's, the user's line is behind it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from gpulab.torch_hooks.patching import replaced
from gpulab.user_code import is_gpulabs_file, is_users_file


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
