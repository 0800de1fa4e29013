"""A planted cell as its user meets it: earlier cells, then `%%gpuprofile` above the training cell, in IPython."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from benchmarks.planted.planted import Planted


def profiled(planted: Planted) -> Any:
    """The `Run` of the cell as written. Raises RuntimeError with what the cell raised."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    before, cell = planted.text
    _run(shell, before, planted.name)
    _run(shell, "%load_ext gpulab", planted.name)
    device = "" if planted.gpu else " --device cpu"
    _run(shell, f"%%gpuprofile --steps {planted.profiled} --no-live --no-save{device}\n{cell}", planted.name)
    import gpulab

    return gpulab.runs[-1]


def _run(shell: Any, text: str, name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        result = shell.run_cell(text)
    error = result.error_before_exec or result.error_in_exec
    if error is not None:
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}\n{errors.getvalue()[-2000:]}")
