"""`gpulab report` and `gpulab compare`: what is stored, or in trace files, to a terminal, a page or JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpulab.cli.output import as_json, complain, write, write_whole

if TYPE_CHECKING:
    from gpulab.views.comparison import Compared

SLOWER_STATUS = 1


def print_report(options: argparse.Namespace) -> int:
    """Do `gpulab report`."""
    with _uncollected():
        from gpulab.api.reading import open_run, report
        from gpulab.store.folders import Store
        from gpulab.views.waiting import waiting
        from gpulab.views.wording import plain

        with waiting(f"reading {plain(str(options.run))}"):
            shown = report(open_run(options.run, Store(options.store)))
            text = as_json(shown) if options.json else ""
            if options.html is not None:
                write_whole(options.html, shown.html())
            elif not options.json:
                text = shown.text(full=options.all)
        write(text or f"Report written to {plain(str(options.html))}\n")
        return 0


def print_comparison(options: argparse.Namespace) -> int:
    """Do `gpulab compare`."""
    with _uncollected():
        from gpulab.api.reading import compare, open_run
        from gpulab.store.folders import Store
        from gpulab.views.waiting import waiting
        from gpulab.views.wording import plain

        store = Store(options.store)
        with waiting("reading " + plain(", ".join(map(str, options.runs)))):
            opened = [open_run(run, store) for run in options.runs]
            compared = compare(*opened, price_per_hour=options.price_per_hour)
        if options.html is not None:
            write_whole(options.html, compared.html())
            write(f"Comparison written to {plain(str(options.html))}\n")
        else:
            write(as_json(compared) if options.json else compared.text(full=options.all))
        return 0 if options.fail_if_slower is None else _gate(compared, options.fail_if_slower)


def _gate(compared: Compared, limit: float) -> int:
    """The exit status of `--fail-if-slower`: 1 where a run was measured to be slower by more than the limit.

    What is not comparable fails, too; what is undecided does not, and is said.
    """
    from gpulab.formatting import percent

    for comparison in compared.comparisons:
        ratio = comparison.ratio
        slower = comparison.verdict == "slower" and ratio is not None and ratio > 1 + limit
        if slower or comparison.verdict == "not comparable":
            why = f"slower by more than {percent(limit)}" if slower else "not comparable"
            complain(f"{comparison.b.label} is {why}: exit status {SLOWER_STATUS}")
            return SLOWER_STATUS
        if comparison.verdict == "undecided":
            complain(f"{comparison.b.label}: undecided whether it is slower; record more steps")
    return 0


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected: few cycles are made here, and looking for them takes a tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
