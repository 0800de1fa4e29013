"""`python -m benchmarks.kills CASE … [--count N] [--at-once N]`."""

from benchmarks.kills import main

main()
