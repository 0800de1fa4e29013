"""The command line: each command's module is imported when it is chosen, so that help and mistakes cost no wait.

One place turns our errors into one line and exit status 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from gpulab.cli.arguments import parse
from gpulab.cli.output import USAGE_STATUS, complain, write
from gpulab.errors import GpulabError

BROKEN_PIPE_STATUS = 141
_OWN_WORDS = {  # these read their own words, as their magics do
    "runs": ("gpulab.api.runs_command", "terminal"),
    "fleet": ("gpulab.api.fleet", "terminal"),
    "tensorboard": ("gpulab.api.tensorboard", "terminal"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do one command; returns the exit status. Of `record`, it is the script's own."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given and given[0] in _OWN_WORDS:
            shown = _function(*_OWN_WORDS[given[0]])(given[1:])
            text, status = shown if isinstance(shown, tuple) else (shown, 0)
            if isinstance(text, str):
                write(text)
            return int(status)
        options = parse(given)
        status = _function(*options.do)(options)
        return status if isinstance(status, int) else 0
    except GpulabError as e:
        complain(str(e))
        return USAGE_STATUS
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS


def _function(module: str, name: str) -> Callable[..., object]:
    function: Callable[..., object] = getattr(import_module(module), name)
    return function
