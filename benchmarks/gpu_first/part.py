"""The process of one part: `python -m benchmarks.gpu_first.part MODULE ARGUMENTS ANSWER [--simulate]`."""

from __future__ import annotations

import argparse
import importlib
import json
import resource
from pathlib import Path


def main() -> None:
    """Call the module's `measure(answer, stage, **arguments)`. What it raises ends the process with a traceback."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--simulate", action="store_true")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash with CUDA would write gigabytes

    from benchmarks.gpu_first.answer import Answer
    from benchmarks.gpu_first.stage import Stage

    stage = Stage.here(simulate=given.simulate)
    answer = Answer(given.answer, simulated=stage.simulated)
    importlib.import_module(given.module).measure(answer, stage, **given.arguments)


if __name__ == "__main__":
    main()
