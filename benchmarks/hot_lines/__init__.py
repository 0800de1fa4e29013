"""Small datasets and loops with one hot line each: which line does gpulab name?

Each case is a file of `cases/` whose hot statement is marked `# HOT`. A stopwatch around that statement, in a run
without gpulab, proves the mark: the statement takes most of the time that is asked about (making the batches, or the
loop's own step). A named line is right where it lies in the marked statement, wrong elsewhere; to name none, or only
the function, is neither.
"""

from benchmarks.hot_lines.scoring import measure

__all__ = ["measure"]
