"""`python -m benchmarks.gpu_first --out FOLDER [--simulate] [--budget SECONDS] [PART…]`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.conductor import what_is_missing
from benchmarks.gpu_first.parts import BUDGET_S, PARTS
from benchmarks.gpu_first.session import Folder, clear, play_all
from benchmarks.gpu_first.table import table


def main() -> int:
    """Exit status 0 when it ran to its end, whatever it measured; 2 where a package is missing."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_first", description="Measure gpulab on a GPU for 10 minutes.")
    parser.add_argument(
        "names", nargs="*", metavar="PART", help="all without a name: " + "; ".join(p.name for p in PARTS)
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="at most eight files are written there"
    )
    parser.add_argument("--simulate", action="store_true", help="the CPU stands in for a GPU, with tiny sizes")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="for everything together")
    options = parser.parse_args()
    wrong = sorted(set(options.names) - {part.name for part in PARTS})
    if wrong:
        parser.error(f"no part {wrong[0]!r}: {'; '.join(p.name for p in PARTS)}")
    if missing := what_is_missing():
        print(missing, file=sys.stderr)
        return 2
    folder = Folder(options.out)
    clear(folder)
    selection = [part for part in PARTS if not options.names or part.name in options.names]
    results = play_all(selection, folder, simulate=options.simulate, budget_s=options.budget)
    folder.table.write_text(table(results), encoding="utf-8")
    print(f"\n{table(results, short=True)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
