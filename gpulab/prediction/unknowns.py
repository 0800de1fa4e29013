"""What a run does not show of itself, as each of the values that it may have: a prediction's interval covers them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpulab.prediction.baseline import Making, Today, training_cores

# A CPU's operator is as slow as its slowest thread, and one that has to share its core holds up the others: measured on
# two cores, two threads beside two workers that decode images, a step took 1.0 to 1.5 times what its work would take.
CROWDED = (1.0, 1.5)
CROWDED_FROM = 0.5  # of the making waited for something else: then the workers leave the cores free
# Two processes at once, each with a core of its own, measured: arithmetic takes as long as alone, passes over large
# arrays take 1.2 to 1.7 times as long, decoding images 1.1 times.
SHARED = (1.0, 1.25)
# PyTorch gives Python's lock away in each call. In a worker another thread, which hands batches over, takes it then,
# and the call waits to have it back: measured, 2,100 calls of 2 µs took 9 ms in a worker that sends, 4.5 ms in one that
# does not.
CALL_US = 4.0
HANDING = (0.7, 1.3)  # times what handing a batch over took where it was measured


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is not known, as one of the values that it may have: the share of making that waits, the cores that the
    training takes, how many times as long as today it computes, what making a batch takes on top, and how many times
    as long the making's work takes beside other processes, and handing over.
    """

    waited_fraction: float
    training_cores: float
    slower: float = 1.0
    more_us: float = 0.0
    shared: float = 1.0
    handing: float = 1.0


def assumptions(
    today: Today, making: Making | None, workers: int | None, *, remade: bool, threads: int | None
) -> Iterator[Assumed]:
    """All that may be, for that many workers and threads from now on; `remade`: what makes the data was changed."""
    known = making.waited_fraction if making is not None else None
    waited = (0.0, 1.0) if known is None else (known,)
    more = sorted(set(making.more_us)) if making is not None and remade else [0.0]
    alone = not workers or not remade
    if alone:
        waited = waited[:1]
    shared = (1.0,) if alone or today.workers else (SHARED[0], max(SHARED[1], 1 + _waiting_calls(today, making)))
    handing = (1.0,) if alone else HANDING
    if today.on_gpu:
        return (Assumed(w, 1.0, 1.0, m, s, h) for w in waited for m in more for s in shared for h in handing)
    return iter(
        Assumed(w, 1.0 if alone else taken, slower, m, s, h)
        for w in waited
        for taken, slower in _computing(today, workers, w, remade=remade, threads=threads)
        for m in more
        for s in shared
        for h in handing
    )


def _waiting_calls(today: Today, making: Making | None) -> float:
    """Of the making, what its calls of PyTorch may wait at most for Python's lock."""
    if making is None or making.batch_us <= 0:
        return 0.0
    return min(1.0, today.loading_calls * CALL_US / making.batch_us)


def _computing(
    today: Today, workers: int | None, waited_fraction: float, *, remade: bool, threads: int | None
) -> Iterator[tuple[float, float]]:
    """The cores that computing takes, and how many times as long it takes as today."""
    taken, cores = training_cores(today, waited_fraction), today.run.environment.usable_cores
    before = today.run.environment.compute_threads
    if threads is not None and before is not None and threads < before:
        fewer = min(taken, threads)
        return iter([(fewer, 1.0), (fewer, max(1.0, taken / threads))])
    today_threads = before or 1
    crowded = remade and workers and cores and today_threads > 1 and today_threads + workers > cores
    if crowded and waited_fraction < CROWDED_FROM:
        return iter([(taken, by) for by in CROWDED])
    return iter([(taken, 1.0)])


__all__ = ["Assumed", "assumptions"]
