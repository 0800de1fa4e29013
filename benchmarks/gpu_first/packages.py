"""What must be installed before anything can be measured, looked at in one go."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

# module → the distribution that brings it
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "psutil": "psutil",
    "pynvml": "nvidia-ml-py",
    "matplotlib": "matplotlib",
    "pytest": "pytest",
}


def missing(modules: Iterable[str] = NEEDED) -> list[str]:
    """The distributions to install; empty where nothing is missing."""
    return [NEEDED[module] for module in modules if importlib.util.find_spec(module) is None]


def complaint(absent: list[str]) -> str:
    """One sentence with all that is missing and the command that brings it."""
    count = f"{len(absent)} package{'s are' if len(absent) > 1 else ' is'} missing"
    return f"{count}: {', '.join(absent)}. Install with: python -m pip install {' '.join(absent)}"
