"""`python -m benchmarks [NAME…]`: run the benchmarks, keep their results, write the table.

`parity` needs GPULAB_PARITY_CHECKOUTS; what of it is finished is not measured again (`python -m benchmarks.parity -h`).
"""

from __future__ import annotations

import argparse

from benchmarks import first_runs, table
from benchmarks.harness import save


def main() -> None:
    """Run the named benchmarks, all without a name."""
    names = [name for name in table.BENCHMARKS if table.function_of(name, "measure") is not None]
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure gpulab's own cost on an idle machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--table-only", action="store_true", help="only write the table from the kept results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: {', '.join(names)}")
    for name in () if options.table_only else options.names or names:
        print(f"{name} …", flush=True)
        measure = table.function_of(name, "measure")
        assert measure is not None
        save(name, measure())
    first_runs.settle()
    table.PAGE.write_text(table.page(), encoding="utf-8")


main()
