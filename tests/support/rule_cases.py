"""Made-up runs for the tests of rules and of their ranking: steps, shares of a step, and what else a rule looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.analysis.loader import LoadingFacts, WaitParts
from gpulab.diagnosis.finding import Finding, RuleContext
from gpulab.run import Loader, Pause, PauseKind, Run, StepFlag
from gpulab.thresholds import DEFAULT, Thresholds
from tests.support import synthetic
from tests.support.synthetic import MS

STEP_MS = 20.0
COUNT = 60


def loader(workers: int, *, persistent: bool = False, iterable: bool = False) -> Loader:
    """A DataLoader of 1,000 items in batches of 32."""
    return Loader("Photos", 1000, 32, workers, 2 if workers else None, False, persistent, 31, iterable)


def run_of(
    *,
    gpu: bool = False,
    wait: float = 0.0,
    workers: int | None = 0,
    epoch_starts: Mapping[int, float] | None = None,
    cores: float | None = 4.0,
    **changed: Any,
) -> Run:
    """60 steps of 20 ms (40 unprofiled, then 6 profiled), each waiting for data for that share of it.

    `epoch_starts`: these steps begin an epoch, and wait that many ms longer.
    """
    wall, waited = np.full(COUNT, STEP_MS), np.full(COUNT, STEP_MS * wait)
    for row, longer in (epoch_starts or {}).items():
        wall[row] += longer
        waited[row] += longer
    found = synthetic.steps(wall, waited, synthetic.phases(5, 40, 6, 9), optimizer_ms=0.2)
    found.flags[np.array([*(epoch_starts or {})], np.int64)] |= np.uint8(StepFlag.EPOCH_START)
    base = (synthetic.gpu_case() if gpu else synthetic.cpu_case()).run
    environment = replace(base.environment, usable_cores=cores)
    run = replace(
        base,
        steps=found,
        loader=None if workers is None else loader(workers),
        environment=environment,
        wall_ns=int(found.end_ns[-1]) + 40 * MS,
        traced_numbers=tuple(range(45, 51)),
        choices=(),
    )
    return replace(run, **changed)


def case_of(
    run: Run,
    shares: Mapping[str, float] | None = None,
    loading: LoadingFacts | None = None,
    thresholds: Thresholds = DEFAULT,
    **changed: Any,
) -> RuleContext:
    """The run with those shares of its step; by default it computes all the time. Without shares None: not profiled."""
    shares = dict(shares or {})
    rest = 1.0 - sum(shares.values())
    split = {"compute": rest, **shares} if "compute" not in shares else shares
    device = ("compute", "communication", "memcpy", "memset")
    busy = sum(split.get(p, 0.0) for p in device) if run.device.kind == "cuda" else None
    found = synthetic.breakdown(run, split, busy)
    facts = replace(_figures(run), breakdown=found, loading=loading)
    return RuleContext(replace(facts, **changed), thresholds)


def _figures(run: Run) -> Facts:
    """All figures but the accounting, once for each run."""
    if id(run) not in _KNOWN:
        facts = replace(synthetic.facts_of(run), curves=(), integrity=None)
        _KNOWN[id(run)] = (run, facts)
    return _KNOWN[id(run)][1]


_KNOWN: dict[int, tuple[Run, Facts]] = {}


def inside(
    read_ms: float = 0.0,
    transform_ms: float = 0.0,
    collate_ms: float = 0.0,
    *,
    read_waited: float = 0.0,
    core_wait: float = 0.0,
    hand_over_ms: float | None = None,
) -> LoadingFacts:
    """What a batch takes inside the DataLoader. `hand_over_ms`: the loop waits for it so long, and 1 ms to read."""
    return LoadingFacts(
        batches=20,
        of_batches=20,
        items_per_batch=32.0,
        batch_us=(read_ms + transform_ms + collate_ms) * 1e3,
        read_us=read_ms * 1e3,
        transform_us=transform_ms * 1e3,
        collate_us=collate_ms * 1e3,
        hand_over_us=None,
        pin_us=None,
        copy_us=None,
        read_waited_fraction=read_waited,
        transform_waited_fraction=0.0,
        workers=(),
        core_wait_fraction=core_wait,
        wait=None if hand_over_ms is None else WaitParts(1e3, 0.0, 0.0, hand_over_ms * 1e3, 0.0),
    )


def pauses(run: Run, kind: PauseKind, rows: Sequence[int], ms: float, place: int = -1) -> tuple[Pause, ...]:
    """One pause at the beginning of each of these steps."""
    start = run.steps.start_ns[list(rows)].tolist()
    return tuple(Pause(kind, s, s + int(ms * MS), place) for s in start)


def finding(key: str, us: float | None, *parts: str, **more: Any) -> Finding:
    """A finding with this time and these parts."""
    return Finding(key, f"{key}.", (), us, more.pop("confidence", "measured"), parts, **more)
