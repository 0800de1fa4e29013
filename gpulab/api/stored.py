"""`gpulab report` and `gpulab compare`, for stored runs and trace files."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager

from gpulab.views.view import Answer

SLOWER_STATUS = 1


def report_stored(options: argparse.Namespace) -> Answer:
    """Do `gpulab report`. Raises StoreError and TraceError."""
    with _uncollected():
        from gpulab.api.reading import open_run, report
        from gpulab.store.folders import Store
        from gpulab.views.waiting import waiting
        from gpulab.views.wording import plain

        key = " ".join(options.run) or "-1"
        with waiting(f"reading {plain(key)}"):
            return Answer(report(open_run(key, None if options.store is None else Store(options.store))))


def compare_stored(options: argparse.Namespace) -> Answer:
    """Do `gpulab compare`. With `--fail-if-slower` the status is 1 if a run is slower by more than the limit.

    A comparison that is not possible fails, too; an undecided one does not, with a note. Raises StoreError, TraceError.
    """
    with _uncollected():
        from gpulab.api.reading import compare, open_run
        from gpulab.formatting import percent
        from gpulab.store.folders import Store
        from gpulab.views.waiting import waiting
        from gpulab.views.wording import plain

        store = None if options.store is None else Store(options.store)
        with waiting("reading " + plain(", ".join(options.runs))):
            opened = [open_run(run, store) for run in options.runs]
            compared = compare(*opened, price_per_hour=options.price_per_hour)
    complaints = []
    limit = options.fail_if_slower
    for comparison in compared.comparisons if limit is not None else ():
        ratio, name = comparison.ratio, comparison.b.label
        slower = comparison.verdict == "slower" and ratio is not None and ratio > 1 + limit
        if slower or comparison.verdict == "not comparable":
            why = f"slower by more than {percent(limit)}" if slower else "not comparable"
            return Answer(compared, SLOWER_STATUS, complaints=(f"{name} is {why}: exit status {SLOWER_STATUS}",))
        if comparison.verdict == "undecided":
            complaints.append(f"{name}: undecided whether it is slower; record more steps")
    return Answer(compared, complaints=tuple(complaints))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, garbage collection is off: few cycles arise here, and the search for them takes a tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
