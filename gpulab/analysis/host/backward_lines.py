"""What autograd evaluates for some lines of the forward pass, from looks that met these lines within operators.

A node is its operator's by name: ConvolutionBackward0 is of aten::convolution. What several lines call is divided among
them as the looks within that operator were.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

import numpy as np

from gpulab.analysis.breakdown import Breakdown
from gpulab.analysis.host.needless_work import EVALUATING
from gpulab.intervals import covers, intersect, measure, subtract, union
from gpulab.run import Place, Run
from gpulab.timeline import spans

_FEWEST = 3  # ours: of fewer looks within an operator it is chance whose it is
NODE = re.compile(r"(\w+?)Backward\d*$")  # its operator, as `plain_name` spells it


def plain_name(name: str) -> str:
    """An operator as autograd spells it, without signs and capitals: `aten::add_` is of AddBackward0."""
    return name.rpartition("::")[2].replace("_", "").lower()


def backward_share(run: Run, account: Breakdown | None, places: Collection[Place]) -> float:
    """Of the traced steps; 0 without looks from outside, or without a trace of steps."""
    timeline, stack = run.timeline, run.stack
    windows = None if account is None else account.step_host_windows
    if timeline is None or stack is None or not stack.exact or windows is None or not len(windows):
        return 0.0
    steps = union(windows[:, 0], windows[:, 1])
    operators = defaultdict[str, list[int]](list)
    for i, name in enumerate(timeline.names):
        operators[plain_name(name)].append(i)
    backward = spans.covered(timeline, spans.named(timeline, spans.is_autograd_node))
    mine = np.isin(stack.place, [i for i, place in enumerate(run.places) if place in places])
    total = 0.0
    for i, name in enumerate(timeline.names):
        node = NODE.search(name) if name.startswith(EVALUATING) else None
        if node is None:
            continue
        within = spans.covered(timeline, np.isin(timeline.name_id, operators[plain_name(node[1])]))
        met = covers(subtract(within, backward), stack.t_ns)
        if met.sum() >= _FEWEST:
            evaluated = spans.covered(timeline, timeline.name_id == i)
            total += measure(intersect(evaluated, steps)) * float(mine[met].mean())
    return total / measure(steps)
