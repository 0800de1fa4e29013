"""`gpulab report` and `gpulab compare`: what is stored, or in trace files, to a terminal, a page or JSON.

Others read a large trace meanwhile: they begin before this process imports what makes reports.
"""

from __future__ import annotations

import argparse
import gc

from gpulab.cli.output import as_json, write, write_whole
from gpulab.trace import other_processes


def print_report(options: argparse.Namespace) -> int:
    """Do `gpulab report`."""
    _begin([options.run])
    from gpulab.api.reading import open_run, report
    from gpulab.store.folders import Store
    from gpulab.views.running.waiting import waiting
    from gpulab.views.wording import plain

    with waiting(f"reading {plain(str(options.run))}"):
        shown = report(open_run(options.run, Store(options.store)))
        text = as_json(shown) if options.json else ""
        if options.html is not None:
            write_whole(options.html, shown.html())
        elif not options.json:
            text = shown.text(full=options.all)
    write(text or f"The report is in {plain(str(options.html))}\n")
    return 0


def print_comparison(options: argparse.Namespace) -> int:
    """Do `gpulab compare`."""
    _begin(options.runs)
    from gpulab.api.reading import compare, open_run
    from gpulab.store.folders import Store
    from gpulab.views.running.waiting import waiting
    from gpulab.views.wording import plain

    store = Store(options.store)
    with waiting("reading " + plain(", ".join(map(str, options.runs)))):
        opened = [open_run(run, store) for run in options.runs]
        compared = compare(*opened, price_per_hour=options.price_per_hour)
    if options.html is not None:
        write_whole(options.html, compared.html())
        write(f"The comparison is in {plain(str(options.html))}\n")
    else:
        write(as_json(compared) if options.json else compared.text(full=options.all))
    return 0


def _begin(paths: list[str]) -> None:
    """Nothing here makes cycles to speak of, and the process ends soon: looking for them is a tenth of the wait."""
    gc.disable()
    other_processes.begin(paths[0])
