"""`%gpulab climb` and `gpulab.climb`: try settings one by one and keep those that help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.api.diagnose import learned_here, thresholds_of
from gpulab.api.experiment import code_of, finish, remember_experiment, remember_full_runs
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS, nearest_knob
from gpulab.options import CLIMB_BUDGET_S, CLIMB_SEEDS, QUICK_BUDGET_S, at_most, check_seconds, check_whole_number
from gpulab.prediction.predict import predict
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_record import Bounds
from gpulab.tuning.code import Code
from gpulab.views.climb import Climbed, Climbing

climbs: list[Climbed] = []

_LEAST = {"rungs": 1, "seeds": 0, "steps": 1, "pairs": 1}


def climb(
    code: Callable[[], object] | str | Code | None = None,
    *,
    namespace: dict[str, Any] | None = None,
    budget_s: float = CLIMB_BUDGET_S,
    rungs: int | None = None,
    seeds: int = CLIMB_SEEDS,
    steps: int | None = None,
    pairs: int | None = None,
    without: Iterable[str] = (),
    allow: Iterable[str] = (),
    save: bool = True,
    show: bool = True,
) -> Climbed:
    """Try settings one by one in interleaved blocks and keep each that helps; returns the record and the edit.

    `code`: a function without arguments, the text of a cell with the names of `namespace`, or None for the cell
    profiled last. At most `rungs` settings are tried, within about `budget_s` seconds. `steps`: counted steps of a
    block; `pairs`: pairs of blocks of a comparison. `without`: settings to leave alone; `allow`: settings that may
    change the training (batch_size and accumulate are tried only if allowed). Raises UsageError before anything runs;
    exceptions of the baseline propagate.
    """
    bounds = Bounds(
        budget_s=budget_s,
        rungs=rungs,
        seeds=seeds,
        steps=steps,
        pairs=pairs,
        without=_knobs("without", without),
        allow=_knobs("allow", allow),
        save=save,
    )
    return conduct(code_of(code, namespace), bounds, show=show)


def conduct(code: Code, bounds: Bounds, *, show: bool = True) -> Climbed:
    """Climb within the bounds, store and show the result. An error that ended it early is raised after that."""
    climber = climber_of(code, bounds)
    with Climbing(climber.stop, show=show) as climbing:
        climber.tell, climber.tick, climber.on_attempt = climbing.tell, climbing.tick, climbing.show_ladder
        record = climber.run()
    climbed = Climbed(record)
    climbs.append(climbed)
    if record.whole is not None:
        remember_experiment(record.whole)
    remember_full_runs(climber.full_runs)
    finish(climbing, climbed, climber.error, measured=bool(record.rungs), show=show)
    return climbed


def climber_of(code: Code, bounds: Bounds) -> Climber:
    """The climber with this machine's thresholds and earlier predictions. Raises UsageError as `check` does."""
    check(bounds)
    bounds = replace(bounds, budget_s=at_most(bounds.budget_s, QUICK_BUDGET_S), rungs=at_most(bounds.rungs, 1))
    return Climber(code, bounds, _diagnosed, _predicted, memory_full=thresholds_of().memory_full)


def climb_last(options: argparse.Namespace) -> None:
    """Do `%gpulab climb`. Raises UsageError in one line, and exceptions of the cell."""
    bounds = bounds_of(options)
    conduct(code_of(None), bounds)


def bounds_of(options: argparse.Namespace) -> Bounds:
    """The bounds from the options of a line. Raises UsageError naming the option."""
    return Bounds(
        budget_s=options.budget,
        rungs=options.rungs,
        seeds=options.seeds,
        steps=options.steps,
        pairs=options.pairs,
        without=_knobs("without", _split(options.without or ())),
        allow=_knobs("allow", _split(options.allow or ())),
        save=not options.no_save,
    )


def check(bounds: Bounds) -> None:
    """Raise UsageError for bounds that cannot work, naming the option, or for an invalid threshold of the user."""
    for option, lowest in _LEAST.items():
        check_whole_number(f"--{option}", getattr(bounds, option), lowest)
    check_seconds("--budget", bounds.budget_s)
    both = sorted(bounds.without & bounds.allow)
    if both:
        raise UsageError(f"--without and --allow both name {both[0]}: drop one.")
    thresholds_of()  # raises if the user's file is invalid


def _diagnosed(figures: Facts) -> Diagnosis:
    return diagnose(figures, thresholds_of(), learned_here(figures))


def _predicted(figures: Facts, settings: Mapping[str, str]) -> Prediction:
    return predict(figures, settings, learned_here(figures))


def _knobs(option: str, names: Iterable[str]) -> frozenset[str]:
    knobs = frozenset((names,) if isinstance(names, str) else names)
    for name in sorted(knobs - KNOBS.keys()):
        near = nearest_knob(name)
        hint = f" Did you mean {near}?" if near else f" Settings: {', '.join(KNOBS)}."
        raise UsageError(f"--{option} {name}: no such setting.{hint}")
    return knobs


def _split(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in (part.strip() for part in text.split(",")) if word]
