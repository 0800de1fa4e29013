"""What a report says, word for word, in one file per kind: `GPULAB_GOLDEN=accept pytest …` writes the files anew."""

from __future__ import annotations

import os

from tests.support.paths import TESTS

_FOLDER = TESTS / "golden" / "texts"


def check(name: str, text: str) -> None:
    """Raises AssertionError, with the difference, where `text` is not what the file says."""
    path = _FOLDER / f"{name}.txt"
    if os.environ.get("GPULAB_GOLDEN") == "accept":
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()
