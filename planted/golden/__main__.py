"""`make golden`: recompute every golden answer without any training, and print each difference as one line."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from planted.golden import answers, cases


def main() -> int:
    """Exit status 0 without a difference or with ACCEPT=1; 1 with differences."""
    parser = argparse.ArgumentParser(prog="planted.golden", description=main.__doc__)
    parser.add_argument("--accept", action="store_true", help="keep the answers of now")
    parser.add_argument("--pack", type=Path, metavar="STORE", help="first keep that store's planted runs as inputs")
    options = parser.parse_args()
    if options.pack:
        from planted.catalogue import CELLS

        names = cases.pack(options.pack, {cell.name for cell in CELLS})
        print(f"{len(names)} runs packed, {cases.RUNS.stat().st_size:,} bytes")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["GPULAB_DIR"] = os.environ["GPULAB_CACHE_DIR"] = scratch  # no run of this machine has a say
        cases.unpack(runs := Path(scratch, "golden-runs"))
        every = list(cases.cases(runs))
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            now = dict(zip((case.name for case in every), pool.map(answers.answer, every, chunksize=4), strict=True))
    stored = answers.load() if answers.ANSWERS.exists() else {}
    absent = "" if cases.TRACES.is_dir() else f"; the traces are not compared: there is no {cases.TRACES}"
    if absent:
        stored = {name: value for name, value in stored.items() if not name.startswith("trace ")}
    lines = list(answers.differences(stored, now))
    print("\n".join(lines))
    seconds = time.perf_counter() - began
    print(f"{len(now)} cases, {len(lines)} differences, {seconds:.0f} s{absent}")
    if options.accept:
        answers.save(now if not absent else answers.load() | now)
        print(f"accepted: {answers.ANSWERS.stat().st_size:,} bytes")
    return int(bool(lines) and not options.accept)


if __name__ == "__main__":
    sys.exit(main())
