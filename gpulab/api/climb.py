"""What a user calls to climb: `%gpulab climb` and `gpulab.climb` try settings one by one and keep what helps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.api.arguments import Parser, split
from gpulab.api.diagnose import learned_here, thresholds_of
from gpulab.api.experiment import code_of, ending, remember_experiment, remember_trials
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.errors import UsageError
from gpulab.knobs.catalogue import KNOBS, nearest_knob
from gpulab.options import (
    QUICK_BUDGET_S,
    add_whole_number,
    at_most,
    check_seconds,
    check_whole_number,
    seconds_type,
)
from gpulab.prediction.predict import predict
from gpulab.prediction.prediction import Prediction
from gpulab.tuning.climb import Climber
from gpulab.tuning.climb_record import DEFAULT_BUDGET_S, DEFAULT_SEEDS, Bounds
from gpulab.tuning.plan import Code
from gpulab.views.climb import Climbed, Climbing
from gpulab.views.progress import RESTORED, STOPPED_BY

HELP = f"""\
%gpulab climb [--budget SECONDS] [--rungs N] [--seeds N] [--without NAME,…] [--allow NAME,…]

Tries one setting after another on the last profiled cell, the most promising first. Each is measured in short
interleaved blocks against the cell with the settings kept so far. When the findings name no more, each other setting
that leaves the training unchanged gets a few blocks, and the fastest one a full try. A setting is kept only if the
blocks show a speedup and the loss stays the same. At the end gpulab prints the edit that makes them permanent.

  --budget SECONDS   total time (default: {DEFAULT_BUDGET_S:g})
  --rungs N          try at most N settings
  --seeds N          runs with other seeds (default: {DEFAULT_SEEDS}), only if a setting changes the loss: is that
                     within seed-to-seed noise?
  --steps N          counted steps of a block
  --pairs N          pairs of blocks of each comparison
  --without NAME,…   do not try these settings
  --allow NAME,…     settings that may change the training; batch_size and accumulate are tried only if named here
  --no-save          do not keep the runs on disk

{RESTORED}
{STOPPED_BY} The result is also gpulab.climbs[-1]."""

climbs: list[Climbed] = []

_LEAST = {"rungs": 1, "seeds": 0, "steps": 1, "pairs": 1}


def climb(
    code: Callable[[], object] | str | Code | None = None,
    *,
    namespace: dict[str, Any] | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    rungs: int | None = None,
    seeds: int = DEFAULT_SEEDS,
    steps: int | None = None,
    pairs: int | None = None,
    without: Iterable[str] = (),
    allow: Iterable[str] = (),
    save: bool = True,
    show: bool = True,
) -> Climbed:
    """Try settings one by one in interleaved blocks and keep each that helps; give the record and the edit.

    `code` is a function without arguments, the text of a cell, whose names are then those of `namespace`, or None for
    the cell that was profiled last. At most `rungs` settings are tried, within about `budget_s` seconds. `steps`
    counted steps make a block, `pairs` of blocks a comparison. `without` are settings to leave alone; `allow` those
    that may change the training: batch_size and accumulate are tried only so. Raises UsageError before anything runs;
    what the baseline raises passes.
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
    """Climb within the bounds, remember and show what came of it. What ended it early is raised after that."""
    climber = climber_of(code, bounds)
    with Climbing(climber.stop, show=show) as climbing:
        climber.tell, climber.tick, climber.on_attempt = climbing.tell, climbing.tick, climbing.show_ladder
        record = climber.run()
    climbed = Climbed(record)
    climbs.append(climbed)
    if record.whole is not None:
        remember_experiment(record.whole)
    remember_trials(climber.trials)
    if climber.error is not None and not record.rungs:  # the error says it all
        climbing.clear()
    else:
        try:
            climbing.put(climbed)
        except Exception as e:
            sys.stderr.write(f"gpulab: the climb could not be shown ({type(e).__name__}: {e})\n")
    if climber.error is not None:
        raise ending(climber.error, shown=show and bool(record.rungs))
    return climbed


def climber_of(code: Code, bounds: Bounds) -> Climber:
    """What climbs, with this machine's thresholds and what it has learned. Raises UsageError as `check` does."""
    check(bounds)
    bounds = replace(bounds, budget_s=at_most(bounds.budget_s, QUICK_BUDGET_S), rungs=at_most(bounds.rungs, 1))
    return Climber(code, bounds, _diagnosed, _predicted, memory_full=thresholds_of().memory_full)


def magic(line: str) -> None:
    """`%gpulab climb …`. Raises UsageError in one line, and what the cell raises."""
    words = split(line, "%gpulab climb")
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    bounds = parsed(words)
    conduct(code_of(None), bounds)


def parsed(words: Sequence[str], prog: str = "%gpulab climb") -> Bounds:
    """The bounds that a line asks for. Raises UsageError naming the option."""
    parser = Parser(prog, "[--budget SECONDS] [--rungs N] [--seeds N] [--without NAME,…] [--allow NAME,…]")
    parser.add_argument("--budget", type=seconds_type("--budget"), default=DEFAULT_BUDGET_S)
    for option, least in _LEAST.items():
        add_whole_number(parser, f"--{option}", least)
    parser.set_defaults(seeds=DEFAULT_SEEDS)
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--no-save", action="store_true")
    given = parser.read(words)
    return Bounds(
        budget_s=given.budget,
        rungs=given.rungs,
        seeds=given.seeds,
        steps=given.steps,
        pairs=given.pairs,
        without=_knobs("without", _split(given.without)),
        allow=_knobs("allow", _split(given.allow)),
        save=not given.no_save,
    )


def check(bounds: Bounds) -> None:
    """Refuse bounds that cannot work. Raises UsageError naming the option, or a wrong threshold of the user's."""
    for option, lowest in _LEAST.items():
        check_whole_number(f"--{option}", getattr(bounds, option), lowest)
    check_seconds("--budget", bounds.budget_s)
    both = sorted(bounds.without & bounds.allow)
    if both:
        raise UsageError(f"--without and --allow both name {both[0]}: drop one.")
    thresholds_of()  # the user's own may be wrong


def _diagnosed(figures: Facts) -> Diagnosis:
    return diagnose(figures, thresholds_of(), learned_here(figures))


def _predicted(figures: Facts, settings: Mapping[str, str]) -> Prediction:
    return predict(figures, settings, learned_here(figures))


def _knobs(option: str, names: Iterable[str]) -> frozenset[str]:
    chosen = frozenset((names,) if isinstance(names, str) else names)
    for name in sorted(chosen - KNOBS.keys()):
        near = nearest_knob(name)
        meant = f" Did you mean {near}?" if near else f" Settings: {', '.join(KNOBS)}."
        raise UsageError(f"--{option} {name}: no such setting.{meant}")
    return chosen


def _split(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in (part.strip() for part in text.split(",")) if word]
