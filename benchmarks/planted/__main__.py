"""`python -m benchmarks.planted [NAME…] [--no-cure | --no-diagnosis] [--store FOLDER]`: some cells while building.

No result is kept. `--store` keeps the runs themselves, for `make ablate`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.planted import named, row_of
from benchmarks.planted.catalogue import cells_of


def main() -> None:
    """Without a name all cells that are not kept aside."""
    parser = argparse.ArgumentParser(prog="benchmarks.planted", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--no-cure", action="store_true", help="diagnose only; the cure is not measured")
    parser.add_argument("--no-diagnosis", action="store_true", help="measure the cure only: is the truth true?")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep the run of each cell there, by its name")
    asked = parser.parse_args()
    store = str(asked.store.absolute()) if asked.store else ""
    cells = [named(n) for n in asked.names] or cells_of("tuned")
    for planted in cells:
        row = row_of(planted, diagnose=not asked.no_diagnosis, cures=not asked.no_cure, store=store)
        for finding in row.get("findings", ()):
            print("       ", *(finding[k] for k in ("key", "recoverable_us_per_step", "settings", "prediction")))


main()
