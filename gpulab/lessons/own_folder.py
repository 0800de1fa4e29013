"""A learner's own copy of the lessons: made from what is installed, never over what is there."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpulab.errors import StoreError, UsageError
from gpulab.lessons.editions import Edition, edition
from gpulab.store.files import reason
from gpulab.user_code import PACKAGE_FOLDER

INSTALLED = "share/gpulab/notebooks"  # below the environment's data folder, as pyproject.toml says
FIRST = "00_quick_start.ipynb"


class Copied(Struct, frozen=True):
    """What a folder got: the names of new notebooks, and of those that were there and stay as they are."""

    folder: Path
    new: tuple[str, ...]
    kept: tuple[str, ...]


def notebooks() -> list[Path]:
    """The lessons as shipped: of the checkout that this gpulab runs from, else of the installed package.

    Raises UsageError where there are none.
    """
    places = (PACKAGE_FOLDER.parent / "notebooks", Path(sysconfig.get_path("data")) / INSTALLED)
    for place in places:
        if (place / FIRST).is_file():
            return sorted(place.glob("*.ipynb"))
    raise UsageError(
        f"The lessons are not installed: neither {str(places[0])!r} nor {str(places[1])!r} has them. Install gpulab "
        "again, or open them from a clone."
    )


def copy_lessons(folder: Path, kind: Edition = "self-study") -> Copied:
    """Copy every lesson that is not there yet, without its outputs: they would tell what the reader is to guess.

    Raises StoreError where the folder cannot be written.
    """
    new, kept = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in notebooks():
            notebook = edition(json.loads(source.read_text(encoding="utf-8")), kind)
            try:
                with (folder / source.name).open("x", encoding="utf-8") as file:
                    json.dump(_without_outputs(notebook), file, indent=1, ensure_ascii=False)
                new.append(source.stem)
            except FileExistsError:
                kept.append(source.stem)
    except OSError as e:
        raise StoreError(f"The lessons cannot be copied to {str(folder)!r}: {reason(e)}.") from e
    return Copied(folder, tuple(new), tuple(kept))


def _without_outputs(notebook: Any) -> Any:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return notebook


def jupyterlab_command(folder: Path, notebook: str, args: Sequence[str]) -> list[str]:
    """What opens JupyterLab in the folder on that notebook.

    Raises UsageError where it is not installed, or would refuse to run.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise UsageError("JupyterLab is not installed: pip install 'gpulab[demo,lab]', then gpulab lab again.")
    if _is_superuser() and "--allow-root" not in args:
        raise UsageError(
            "You are root, as which JupyterLab runs only if it is told to: gpulab lab -- --allow-root "
            "(make lab LAB_FLAGS=--allow-root)."
        )
    return [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{notebook}.ipynb",
        *args,
    ]


def _is_superuser() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
