"""The process that is TensorBoard: it ends with its input, which the notebook's process closes however that ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from importlib import import_module

_GRACE_S = 3.0


def main() -> None:
    """TensorBoard with the options of the command line, until the input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[0] = "tensorboard"
    import_module("tensorboard.main").run_main()


def _end_with_input() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGTERM)  # we lead a group of our own: those the plugin has started are in it
        time.sleep(_GRACE_S)  # for its handlers, which remove what it left in the temporary folder
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
