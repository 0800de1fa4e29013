"""What `import gpulab` and `%load_ext gpulab` cost in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.harness import Figure

REPEATS = 9

IMPORT = """
import sys, time
t = time.perf_counter()
import gpulab
took = time.perf_counter() - t
assert "torch" not in sys.modules and "IPython" not in sys.modules
print(took * 1e3)
"""
EXTENSION = """
import time
import torch
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
t = time.perf_counter()
shell.run_line_magic("load_ext", "gpulab")
print((time.perf_counter() - t) * 1e3)
"""


def measure() -> dict[str, object]:
    """Milliseconds: median, least and most of fresh processes."""
    return {"import_gpulab_ms": _timed(IMPORT), "load_ext_after_torch_ms": _timed(EXTENSION)}


def _timed(code: str) -> dict[str, float]:
    runs = sorted(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(REPEATS)
    )
    return {"median": runs[REPEATS // 2], "least": runs[0], "most": runs[-1]}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Medians."""
    yield Figure("`import gpulab`, without torch", results["import_gpulab_ms"]["median"], "ms", target="import")
    extension = results["load_ext_after_torch_ms"]["median"]
    yield Figure("`%load_ext gpulab`, torch already imported", extension, "ms", target="extension")
