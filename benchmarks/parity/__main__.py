"""`python -m benchmarks.parity [--only KEY…]`: some trainings. What is finished is not measured again."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.parity import KEPT, PARTS, row_of, summary
from benchmarks.parity.catalogue import TRAININGS, named
from benchmarks.parity.limits import Limits
from benchmarks.parity.staging import CHECKOUTS


def checkouts() -> list[str]:
    """Commands that fetch what the environment variable is to name."""
    needed = dict.fromkeys((t.repository, t.commit, t.checkout) for t in TRAININGS if t.repository)
    return [f"export {CHECKOUTS}=FOLDER", 'mkdir -p "$FOLDER" && cd "$FOLDER"'.replace("$FOLDER", f"${CHECKOUTS}")] + [
        f"git clone https://github.com/{repository} {name} && git -C {name} checkout {commit}"
        for repository, commit, name in needed
    ]


def main() -> None:
    """Without a name all of them. The table is written by `python -m benchmarks parity`."""
    keys = [training.key for training in TRAININGS]
    parser = argparse.ArgumentParser(prog="benchmarks.parity", description=main.__doc__)
    parser.add_argument("--only", nargs="+", choices=keys, default=keys, metavar="KEY", help=", ".join(keys))
    parser.add_argument("--again", action="store_true", help="climb and judge anew; the search is kept")
    parts = [part.name for part in PARTS]
    parser.add_argument("--until", choices=parts, default=parts[-1], metavar="PART", help=", ".join(parts))
    parser.add_argument("--results", type=Path, default=KEPT, metavar="FOLDER", help="default: benchmarks/results")
    parser.add_argument("--factor", type=float, default=1.0, help="all time limits times this, to try it out")
    parser.add_argument("--threads", type=int, help="compute threads of the baseline (default: all cores)")
    parser.add_argument("--list", action="store_true", help="only say which checkouts are needed, and how to get them")
    options = parser.parse_args()
    if options.list:
        print("\n".join(checkouts()))
        return
    if options.factor != 1.0 and options.results == KEPT:
        parser.error("--factor is for trying it out: name another folder with --results")
    limits = replace(Limits(), threads=options.threads).times(options.factor)
    rows = [
        row_of(named(key), limits, folder=options.results.absolute(), again=options.again, until=options.until)
        for key in options.only
    ]
    whole = summary(rows)
    print(f"{whole['reached']} of {whole['tried']} reached the best")


main()
