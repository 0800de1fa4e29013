"""`python -m benchmarks.planted [NAME…] [--no-cure | --no-diagnosis]`: some cells while building, nothing is kept."""

from __future__ import annotations

import argparse

from benchmarks.planted import named, row_of
from benchmarks.planted.catalogue import cells_of


def main() -> None:
    """Without a name all cells that are not kept aside."""
    parser = argparse.ArgumentParser(prog="benchmarks.planted", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--no-cure", action="store_true", help="diagnose only; the cure is not measured")
    parser.add_argument("--no-diagnosis", action="store_true", help="measure the cure only: is the truth true?")
    asked = parser.parse_args()
    cells = [named(n) for n in asked.names] or cells_of("tuned")
    for planted in cells:
        row = row_of(planted, diagnose=not asked.no_diagnosis, cures=not asked.no_cure)
        for finding in row.get("findings", ()):
            print("       ", *(finding[k] for k in ("key", "recoverable_us_per_step", "settings", "prediction")))


main()
