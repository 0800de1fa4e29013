"""Where a Python that gpulab starts looks for modules: where this one does, and where gpulab itself lies."""

from __future__ import annotations

import os
import sys

from gpulab.user_code import PACKAGE_FOLDER


def import_path() -> list[str]:
    """A `sys.path` for another process, which may run in another folder: the empty entry becomes this folder."""
    return [*(path or os.getcwd() for path in sys.path), str(PACKAGE_FOLDER.resolve().parent)]
