"""`python -m benchmarks [NAME…]`: run the benchmarks, keep their results, write the table.

`parity` needs GPULAB_PARITY_CHECKOUTS; what of it is finished is not measured again (`python -m benchmarks.parity -h`).
`planted --tuned` runs the planted cells that rules may be built with, `planted --aside` those kept aside.
"""

from __future__ import annotations

import argparse

from benchmarks import (
    advisers,
    calibration,
    climbing,
    diagnosing,
    fuzz,
    hot_lines,
    imports,
    kills,
    live_window,
    loaded_comparisons,
    loaded_planted,
    loading_clock,
    memory,
    overhead,
    parity,
    planted,
    planted_knobs,
    planted_ranks,
    power,
    rank_loading,
    replay,
    report_time,
    restoring,
    simulated_loops,
    spool_cost,
    stragglers,
    table,
    trace_reading,
    waits,
)
from benchmarks.harness import save
from benchmarks.planted import results

BENCHMARKS = {
    "waits": waits.measure,
    "imports": imports.measure,
    "report_time": report_time.measure,
    "overhead": overhead.measure,
    "memory": memory.measure,
    "spool_cost": spool_cost.measure,
    "live_look": spool_cost.measure_look,
    "kills": kills.measure,
    "stragglers": stragglers.measure,
    "trace_reading": trace_reading.measure,
    "live_window": live_window.measure,
    "loading_clock": loading_clock.measure,
    "rank_loading": rank_loading.measure,
    "replay": replay.measure,
    "diagnosing": diagnosing.measure,
    "fuzz": fuzz.measure,
    "restoring": restoring.measure,
    "calibration": calibration.measure,
    "power": power.measure,
    "loaded_comparisons": loaded_comparisons.measure,
    "loaded_planted": loaded_planted.measure,
    "hot_lines": hot_lines.measure,
    "planted_knobs": planted_knobs.measure,
    "planted_ranks": planted_ranks.measure,
    "climbing": climbing.measure,
    "parity": parity.measure,
    "simulated_loops": simulated_loops.measure,
    "planted_tuned": planted.tuned,
    "planted_aside": planted.aside,
    "advisers": advisers.measure,  # after the planted ones, whose findings it shows
}
PLANTED = ["planted_tuned", "planted_aside"]


def main() -> None:
    """Run the named benchmarks, all without a name."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure gpulab's own cost on an idle machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--table-only", action="store_true", help="only write the table from the kept results")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--tuned", action="store_true", help="of `planted` only the cells that rules may be built with")
    part.add_argument("--aside", action="store_true", help="of `planted` only the cells kept aside")
    asked = parser.parse_args()
    parts = PLANTED[:1] if asked.tuned else PLANTED[1:] if asked.aside else PLANTED
    names = [name for given in asked.names for name in (parts if given == "planted" else [given])]
    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: planted, {', '.join(BENCHMARKS)}")
    for name in () if asked.table_only else names or BENCHMARKS:
        print(f"{name} …", flush=True)
        save(name, BENCHMARKS[name]())
    results.settle()
    table.write()


main()
