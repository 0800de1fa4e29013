"""The command line: `gpulab COMMAND`. gpulab's errors become one line and exit status 2 here."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from gpulab.arguments import HelpRequest, perform, text_of
from gpulab.errors import GpulabError, StoreError

if TYPE_CHECKING:
    import argparse

    from gpulab.views.comparison import Compared
    from gpulab.views.report.ranks import RankedReport
    from gpulab.views.report.report import Report

USAGE_STATUS = 2
BROKEN_PIPE_STATUS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, for `record` the script's own."""
    try:
        answer, options = perform(sys.argv[1:] if argv is None else argv, "terminal")
        if text := text_of(answer, options):
            _write(text)
        for sentence in answer.complaints:
            complain(sentence)
        return answer.status
    except HelpRequest as e:
        _write(f"{e}\n")
        return 0
    except GpulabError as e:
        complain(str(e))
        return USAGE_STATUS
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS


def _write(text: str) -> None:
    """Write to the terminal, also if its encoding lacks "µ"."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Print one line about a failure to standard error."""
    from gpulab.views.wording import plain  # imports the record and NumPy: only on a failure

    print(f"gpulab: {plain(text)}", file=sys.stderr)


def show_recorded(result: Report | RankedReport | Compared, options: argparse.Namespace, terminal: TextIO) -> int:
    """Print the result of `gpulab record` and write the requested files. Returns the exit status."""
    from gpulab.store.files import write_whole
    from gpulab.views.view import as_json

    terminal.write("\n" + result.text(full=options.all))
    terminal.flush()
    try:
        if options.html is not None:
            write_whole(options.html, result.html().encode())
        if options.json is not None:
            write_whole(options.json, as_json(result).encode())
    except StoreError as e:
        complain(str(e))
        return USAGE_STATUS
    return 0
