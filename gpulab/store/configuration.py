"""The user's own figures: `gpulab.toml` in the current folder, else in `$GPULAB_DIR`."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from gpulab.errors import UsageError

FILE = "gpulab.toml"


def configured(table: str) -> dict[str, object]:
    """That table of the user's file, as TOML has it; empty where there is no file, or no such table in it.

    The file of the current folder counts alone, where there is one. Raises UsageError in one line for a file that
    cannot be read, or a table that is none.
    """
    try:
        path = configuration_path()
    except OSError as e:
        raise UsageError(f"gpulab cannot look for {FILE}: {e.strerror or e}.") from e
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{str(path)!r} cannot be read: {getattr(e, 'strerror', None) or 'it is not UTF-8'}.") from e
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"{str(path)!r} is not TOML: {e}. Write for example [{table}] and name = 0.1 below it.") from e
    values = document.get(table, {})
    if not isinstance(values, dict):
        raise UsageError(f"{str(path)!r}: {table} is not a table: write [{table}] on a line of its own.")
    return values


def configuration_path() -> Path | None:
    """The file that counts; None where there is none."""
    folders = ["", os.environ.get("GPULAB_DIR") or ""]
    return next((path for folder in folders if (path := Path(folder) / FILE).is_file()), None)
