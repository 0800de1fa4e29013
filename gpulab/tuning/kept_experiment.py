"""An experiment as bytes: another process, or another machine, ran it. Its full runs are stored under their ids."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.errors import StoreError
from gpulab.run import Run
from gpulab.tuning.record import Experiment, Side


class _Kept(Struct, frozen=True):
    """`runs` are the ids of the sides' full runs; empty where a side has none."""

    experiment: Experiment
    runs: tuple[str, ...]


def encoded(experiment: Experiment) -> bytes:
    """For `decoded`; the runs themselves are not in it."""
    runs = tuple(side.facts.run.id if side.facts is not None else "" for side in experiment.sides)
    sides = tuple(map(_bare, experiment.sides))
    comparisons = tuple(replace(c, a=_bare(c.a), b=_bare(c.b)) for c in experiment.comparisons)
    return msgspec.msgpack.encode(_Kept(replace(experiment, sides=sides, comparisons=comparisons), runs))


def decoded(content: bytes, load: Callable[[str], Run]) -> Experiment:
    """Raises StoreError where it cannot be read, or `load` has not the run."""
    try:
        kept = msgspec.msgpack.decode(content, type=_Kept)
    except msgspec.MsgspecError as e:
        raise StoreError(f"What the ranks measured cannot be read: {e}.") from e
    experiment = kept.experiment
    figures: list[Facts | None] = [facts(load(id_)) if id_ else None for id_ in kept.runs]
    sides = tuple(replace(side, facts=own) for side, own in zip(experiment.sides, figures, strict=True))
    comparisons = tuple(
        replace(c, a=replace(c.a, facts=figures[0]), b=replace(c.b, facts=own))
        for c, own in zip(experiment.comparisons, figures[1:], strict=True)
    )
    return replace(experiment, sides=sides, comparisons=comparisons)


def joined(experiments: list[Experiment]) -> Experiment:
    """Experiments that each compared settings of their own with the same code as written, on nodes of their own.

    Each comparison keeps the A that ran beside it.
    """
    first = experiments[0]
    return replace(
        first,
        sides=(first.sides[0], *(side for one in experiments for side in one.sides[1:])),
        comparisons=tuple(c for one in experiments for c in one.comparisons),
        seconds=max(one.seconds for one in experiments),
        stopped=any(one.stopped for one in experiments),
        notes=tuple(dict.fromkeys(note for one in experiments for note in one.notes)),
    )


def _bare(side: Side) -> Side:
    return replace(side, facts=None)
