"""How many processes the user's code starts through `multiprocessing`, in which nothing is measured.

`torch.multiprocessing.spawn`, Lightning's `ddp_notebook` and `ddp_spawn` and Accelerate's `notebook_launcher` start
their ranks so. Workers of a DataLoader or of a pool, and what gpulab starts itself, are no such processes.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from typing import Any

from gpulab.torch_hooks.patching import replaced

_NO_RANKS = ("torch.utils.data.", "multiprocessing.", "concurrent.", "joblib.", "gpulab.")


class StartedProcesses:
    """Counts them from `install` on."""

    def __init__(self) -> None:
        self.count = 0

    def install(self, undo: ExitStack) -> None:
        """Hear of every start; `undo` ends that."""
        own = os.getpid()

        def wrap(original: Any) -> Any:
            def start(process: BaseProcess) -> None:
                if os.getpid() == own and not _module(process).startswith(_NO_RANKS):
                    self.count += 1
                original(process)

            return start

        undo.enter_context(replaced(BaseProcess, "start", wrap))


def _module(process: BaseProcess) -> str:
    """Of the function that the process runs."""
    return str(getattr(getattr(process, "_target", None), "__module__", None) or type(process).__module__)
