"""Versions of the packages that affect the figures. Imports no NumPy and no torch: the sampling process imports it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

PACKAGES = (
    "torch",
    "numpy",
    "torchvision",
    "lightning",
    "pytorch-lightning",
    "accelerate",
    "transformers",
    "datasets",
    "triton",
    "nvidia-ml-py",
    "ipykernel",
    "ipython",
    "jupyterlab",
    "notebook",
    "anywidget",
    "gpulab",
)


def package_versions() -> Iterator[tuple[str, str]]:
    """Name and version of each of these packages that is installed."""
    import importlib.metadata  # imports email and zipfile

    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            text = importlib.metadata.distribution(name).read_text("METADATA") or ""
            version = re.search(r"^Version: *(\S+)", text, re.MULTILINE)  # parsing it as a mail takes 3 ms each
            yield name, version[1] if version else importlib.metadata.version(name)
