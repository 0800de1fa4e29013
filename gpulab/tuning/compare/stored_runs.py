"""Stored runs and loaded traces against each other."""

from __future__ import annotations

from collections.abc import Sequence

from gpulab.analysis.facts import facts
from gpulab.errors import UsageError
from gpulab.run import Run
from gpulab.tuning.compare.sequential import compare_sequential
from gpulab.tuning.record import Comparison, Experiment, Side


def compare_runs(runs: Sequence[Run], *, notes: Sequence[str] = ()) -> Comparison | Experiment:
    """The runs after the first against the first. Raises UsageError for fewer than two.

    Two runs give a Comparison, more an Experiment. `notes` are told with each.
    """
    if len(runs) < 2:
        raise UsageError("A comparison needs two runs: name the one to compare with first, then the other.")
    sides = [_side(run, _label(run, i, runs)) for i, run in enumerate(runs)]
    compared = [compare_sequential(sides[0], side, notes=notes) for side in sides[1:]]
    if len(compared) == 1:
        return compared[0]
    return Experiment(
        sides=(compared[0].a, *(c.b for c in compared)),
        comparisons=tuple(compared),
        seconds=sum(run.code_wall_ns for run in runs) / 1e9,
    )


def _side(run: Run, label: str) -> Side:
    return Side(label, dict(run.settings.knobs), facts(run), checks=run.changes)


def _label(run: Run, index: int, runs: Sequence[Run]) -> str:
    """The run's name, told apart from another run of the same name by its id."""
    if sum(other.name == run.name for other in runs) == 1:
        return run.name
    alike = sum(other.id == run.id for other in runs[:index])
    return f"{run.id} ({alike + 1})" if sum(other.id == run.id for other in runs) > 1 else run.id
