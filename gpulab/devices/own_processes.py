"""Processes that gpulab starts for itself. They are no part of what is profiled: no count or sum of the run has them.

A process that gpulab starts names itself by a variable of its environment, which its own children inherit.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gpulab.user_code import PACKAGE_FOLDER

VARIABLE = "GPULAB_PROCESS"
_CALL = """
import importlib, json, sys
sys.path[:], module, function, arguments = json.loads(sys.argv[1])
sys.exit(getattr(importlib.import_module(module), function)(*arguments))
"""
_ENTRY = f"\0{VARIABLE}=".encode()


def marked(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process that gpulab starts for itself."""
    return {**environment, VARIABLE: "1"}


def is_gpulabs(pid: int) -> bool:
    """Whether gpulab, or a process of gpulab's own, started that process. False where the system does not tell."""
    try:
        return _ENTRY in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return _is_by_psutil(pid)


def _is_by_psutil(pid: int) -> bool:
    if os.path.isdir("/proc/self"):
        return False
    try:
        import psutil

        return VARIABLE in psutil.Process(pid).environ()
    except Exception:  # no psutil, no permission, or the process has ended
        return False


def python_command(call: str, *arguments: object) -> list[str]:
    """The command of a Python process that calls "module:function" with these arguments, which it gets as JSON.

    It finds modules where this process does. Without `site` it starts in a third of the time.
    """
    module, _, function = call.partition(":")
    return [sys.executable, "-S", "-P", "-c", _CALL, json.dumps([import_path(), module, function, arguments])]


def import_path() -> list[str]:
    """A `sys.path` for another process, which may run in another folder: the empty entry becomes this folder."""
    return [*(path or os.getcwd() for path in sys.path), str(PACKAGE_FOLDER.resolve().parent)]
