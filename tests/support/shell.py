"""An IPython shell in this process, with gpulab's extension."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@contextmanager
def bare_shell() -> Iterator[InteractiveShell]:
    """It is `get_ipython()` until the end of the block."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    try:
        yield InteractiveShell.instance(config=config)
    finally:
        InteractiveShell.clear_instance()


@contextmanager
def shell_with_gpulab() -> Iterator[InteractiveShell]:
    """The same with `%load_ext gpulab`, taken out again at the end."""
    with bare_shell() as shell:
        extensions = shell.extension_manager
        assert extensions is not None
        extensions.load_extension("gpulab")
        yield shell
        extensions.unload_extension("gpulab")
