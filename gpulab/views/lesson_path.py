"""Where the notebook of a lesson lies, seen from the user's notebook, so that a page can link to it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_WAYS = ("", "notebooks/", "../notebooks/")


def lesson_path(lesson: str, folder: Path | None = None) -> str | None:
    """Relative to `folder` (the one of the user's notebook); None: not there."""
    here = folder or Path.cwd()
    if lesson:
        for way in _WAYS:
            with suppress(OSError):
                if (here / way / f"{lesson}.ipynb").is_file():
                    return f"{way}{lesson}.ipynb"
    return None
