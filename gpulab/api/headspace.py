"""What a user calls to see the speedup of a perfect DataLoader: `%gpulab headspace` and `gpulab.headspace`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gpulab.api.experiment import code_of, finish, last_step_s
from gpulab.options import check_seconds, check_whole_number
from gpulab.tuning.code import Code
from gpulab.tuning.headspace import Differential
from gpulab.views.headspace import HeadspaceReport
from gpulab.views.progress import Stoppable

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
    finish(progress, report, test.error, measured=result.ceiling is not None, show=show)
    return report


def headspace_last(options: argparse.Namespace) -> None:
    """Do `%gpulab headspace`. Raises UsageError in one line, and what the cell raises."""
    headspace(budget_s=options.budget, steps=options.steps, pairs=options.pairs)
