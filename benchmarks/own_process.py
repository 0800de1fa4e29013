"""Runs a benchmark's experiments in a process of their own with one compute thread: nothing of the parent disturbs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def in_own_process(module: str, function: str, **arguments: object) -> dict[str, Any]:
    """What that function gives, called with plain data; its prints pass through. Raises CalledProcessError."""
    return in_limited_process(module, function, arguments)


def in_limited_process(
    module: str, function: str, arguments: Mapping[str, object], *, limit_s: float | None = None
) -> dict[str, Any]:
    """The same. A process that takes longer than `limit_s` is killed, and TimeoutExpired raised."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        subprocess.run(
            [sys.executable, "-m", "benchmarks.own_process", module, function, json.dumps(arguments), str(answer)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            check=True,
            timeout=limit_s,
        )
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """The other side: `module function arguments answer`."""
    module, function, arguments, answer = sys.argv[1:]
    found = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
