"""`python -m benchmarks.planted_ranks [NAME…] [--store FOLDER]`: some scripts while building. No result is kept.

`--store` keeps the runs themselves, and what was printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.planted_ranks import row_of
from benchmarks.planted_ranks.planted import all_cells


def main() -> None:
    """Without a name all scripts."""
    parser = argparse.ArgumentParser(prog="benchmarks.planted_ranks", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--store", type=Path, metavar="FOLDER", help="keep the runs there, in a folder for each script")
    asked = parser.parse_args()
    cells = {planted.name: planted for planted in all_cells()}
    if unknown := [name for name in asked.names if name not in cells]:
        parser.error(f"no script {unknown[0]!r}: {', '.join(cells)}")
    for name in asked.names or cells:
        row = row_of(cells[name], asked.store.absolute() if asked.store else None)
        print("       ", row.get("summary", ""))


main()
