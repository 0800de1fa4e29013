"""What a traced run says about a change: the names of the operators and kernels that ran."""

from __future__ import annotations

import re

import numpy as np

from gpulab.run import Category, Run

OPERATORS = (Category.CPU_OP, Category.KERNEL, Category.GPU_MEMCPY, Category.GPU_MEMSET)


def counts(
    run: Run, categories: tuple[Category, ...] = (*OPERATORS, Category.USER_ANNOTATION)
) -> dict[str, int] | None:
    """How often each operator, annotation and kernel is in the trace; None where there is no trace."""
    timeline = run.timeline
    if timeline is None:
        return None
    ids = timeline.name_id[np.isin(timeline.category, [int(c) for c in categories])]
    times = np.bincount(ids, minlength=len(timeline.names)).tolist()
    return {name: n for name, n in zip(timeline.names, times, strict=True) if n}


def kernels(run: Run) -> tuple[str, ...]:
    timeline = run.timeline
    if timeline is None:
        return ()
    ids = np.unique(timeline.name_id[timeline.category == Category.KERNEL])
    return tuple(timeline.names[i] for i in ids.tolist())


def first_match(pattern: re.Pattern[str], names: tuple[str, ...]) -> str | None:
    """The first name that the pattern is found in, cut where it gets long."""
    first = next((name for name in names if pattern.search(name)), None)
    return first if first is None or len(first) <= 60 else f"{first[:59]}…"
