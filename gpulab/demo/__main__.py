"""`python -m gpulab.demo`: profile the demo's training cell without a notebook, print the report, write it as HTML."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import gpulab
from gpulab.demo import cell
from gpulab.errors import GpulabError, UsageError
from gpulab.options import whole_number_type
from gpulab.store.files import write_whole
from gpulab.user_code import CELL_WITHOUT_IPYTHON
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from gpulab.views.report.report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status: 0, or 1 with one line on stderr."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except UsageError as e:
        parser.error(str(e))
    try:
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            report = profile_demo(steps=options.steps, slow_ms=options.slow_ms)
        print(json.dumps(report.json(), indent=2) if options.json else report.text(full=options.all))
        if options.html is not None:
            write_whole(options.html, report.html().encode())
            print(f"\nThe same report as a page: {options.html}", file=sys.stderr if options.json else sys.stdout)
    except (GpulabError, OSError) as e:
        print(f"gpulab demo: {e}", file=sys.stderr)
        return 1
    return 0


def profile_demo(steps: int | None = None, slow_ms: float = 0.0) -> Report:
    """Profile the demo's training cell through the public API, as a user's script would, and return its report.

    `steps` ends the cell early, `slow_ms` makes each image's loading slower by that many milliseconds.
    Raises GpulabError if the demo's images cannot be written.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    with waiting("importing PyTorch, opening 1,797 images", log=True):
        _execute(cell.SETUP, "<demo setup>", namespace)
    namespace["dataset"].slow_ms = slow_ms  # type: ignore[attr-defined]
    with gpulab.profile("demo", steps=steps, show=False, code=cell.TRAINING, progress_of="the demo") as p:
        _execute(cell.TRAINING, CELL_WITHOUT_IPYTHON, namespace)
    return p.report


def _execute(code: str, filename: str, namespace: dict[str, object]) -> None:
    exec(compile(code, filename, "exec"), namespace)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gpulab.demo", description=__doc__.partition(": ")[2])
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one self-contained page")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of the report")
    parser.add_argument("--all", action="store_true", help="print everything, not only the first 25 lines")
    parser.add_argument(
        "--steps", type=whole_number_type("--steps", 1), metavar="N", help="end the training after N steps"
    )
    parser.add_argument(
        "--slow-ms", type=_duration, default=0.0, metavar="X", help="make loading slower by X ms per image (default 0)"
    )
    return parser


def _duration(text: str) -> float:
    number = float(text)
    if not 0 <= number < 10_000:
        raise argparse.ArgumentTypeError(f"{text} is not a number of milliseconds between 0 and 10000")
    return number


if __name__ == "__main__":
    sys.exit(main())
