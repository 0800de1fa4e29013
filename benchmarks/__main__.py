"""`python -m benchmarks [NAME…]`: run the benchmarks, keep their results, write the table."""

from __future__ import annotations

import argparse

from benchmarks import (
    calibration,
    fuzz,
    imports,
    live_window,
    memory,
    overhead,
    planted_knobs,
    power,
    rank_loading,
    report_time,
    restoring,
    table,
    trace_reading,
)
from benchmarks.harness import save

BENCHMARKS = {
    "imports": imports.measure,
    "report_time": report_time.measure,
    "overhead": overhead.measure,
    "memory": memory.measure,
    "trace_reading": trace_reading.measure,
    "live_window": live_window.measure,
    "rank_loading": rank_loading.measure,
    "fuzz": fuzz.measure,
    "restoring": restoring.measure,
    "calibration": calibration.measure,
    "power": power.measure,
    "planted_knobs": planted_knobs.measure,
}


def main() -> None:
    """Run the named benchmarks, all without a name."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure gpulab's own cost on an idle machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--table-only", action="store_true", help="only write the table from the kept results")
    asked = parser.parse_args()
    unknown = [n for n in asked.names if n not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: {', '.join(BENCHMARKS)}")
    for name in () if asked.table_only else asked.names or BENCHMARKS:
        print(f"{name} …", flush=True)
        save(name, BENCHMARKS[name]())
    table.write()


main()
