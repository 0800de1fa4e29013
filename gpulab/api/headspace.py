"""What a user calls to see the speedup of a perfect DataLoader: `%gpulab headspace` and `gpulab.headspace`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from gpulab.api.arguments import Parser, split
from gpulab.api.experiment import code_of, ending, last_step_s
from gpulab.options import (
    DEFAULT_BUDGET_S,
    FURTHER_BUDGET_S,
    add_whole_number,
    check_seconds,
    check_whole_number,
    seconds_type,
)
from gpulab.tuning.headspace import Differential
from gpulab.tuning.plan import Code
from gpulab.views.headspace import HeadspaceReport
from gpulab.views.progress import RESTORED, STOPPED_BY, Stoppable

_BUDGET_S = DEFAULT_BUDGET_S + FURTHER_BUDGET_S  # of two settings

HELP = f"""\
%gpulab headspace [--budget SECONDS] [--steps N] [--pairs N]

Runs the last profiled cell in short interleaved blocks: the baseline, batches already on the device, and files read
from disk again. Their differences are the cost of preparing the data and of fetching it. The speedup with batches on
the device is that of a perfect DataLoader: no change to the loading can give more.

  --budget SECONDS   total time (default: {_BUDGET_S:g}); at its end the result so far stands
  --steps N          counted steps of a block
  --pairs N          pairs of blocks (default: what fits into the budget, up to 30)

{RESTORED}
{STOPPED_BY} The result is also gpulab.headspaces[-1]."""

headspaces: list[HeadspaceReport] = []

HINT = "End the test at the next step; what was measured so far is shown"


def headspace(
    code: Callable[[], object] | str | Code | None = None,
    *,
    namespace: dict[str, Any] | None = None,
    budget_s: float | None = None,
    steps: int | None = None,
    pairs: int | None = None,
    show: bool = True,
) -> HeadspaceReport:
    """The speedup that a perfect DataLoader would give a cell, and what its data costs each step.

    `code` is a function without arguments, the text of a cell, whose names are then those of `namespace`, or None for
    the cell that was profiled last. `steps` counted steps make a block, `pairs` of blocks are compared, within
    `budget_s` seconds in all. Raises UsageError where the cell takes no data from a DataLoader; what the baseline
    raises passes.
    """
    if budget_s is not None:
        check_seconds("--budget", budget_s)
    check_whole_number("--steps", steps, 1)
    check_whole_number("--pairs", pairs, 1)
    cell = code_of(code, namespace)
    test = Differential(cell, budget_s=budget_s, steps=steps, pairs=pairs, step_s=last_step_s(cell))
    with Stoppable(test.stop, HINT, show=show) as progress:
        test.tell, test.tick = progress.tell, progress.tick
        result = test.headspace()
    report = HeadspaceReport(result)
    headspaces.append(report)
    if test.error is None or result.ceiling is not None:
        try:
            progress.put(report)
        except Exception as e:
            sys.stderr.write(f"gpulab: the result could not be shown ({type(e).__name__}: {e})\n")
    if test.error is not None:
        raise ending(test.error, shown=show and result.ceiling is not None)
    return report


def magic(line: str) -> None:
    """`%gpulab headspace …`. Raises UsageError in one line, and what the cell raises."""
    words = split(line, "%gpulab headspace")
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    budget_s, steps, pairs = parsed(words)
    headspace(budget_s=budget_s, steps=steps, pairs=pairs)


def parsed(words: Sequence[str]) -> tuple[float | None, int | None, int | None]:
    """Budget in s, steps and pairs as a line asks for them. Raises UsageError naming the option."""
    parser = Parser("%gpulab headspace", "[--budget SECONDS] [--steps N] [--pairs N]")
    parser.add_argument("--budget", type=seconds_type("--budget"))
    for option in ("--steps", "--pairs"):
        add_whole_number(parser, option, 1)
    given = parser.read(words)
    return given.budget, given.steps, given.pairs
