"""The headline of a comparison: one sentence, and the figures behind it."""

from __future__ import annotations

import math

import numpy as np

from gpulab.analysis.cores import LEAST_OTHERS
from gpulab.analysis.facts import Facts
from gpulab.diagnosis.headline import Headline
from gpulab.formatting import capitalized, decapitalized, durations, factor_within, percent, plural, speed_within
from gpulab.run import Phase, StepFlag
from gpulab.tuning.compare.cost import cost_sentence, fastest, pays
from gpulab.tuning.compare.parts import ONE_RUN_EACH, both_us, change_us, most_changed
from gpulab.tuning.record import BASELINE, NO_EFFECT, Comparison, Experiment, Side
from gpulab.verdict import EQUIVALENT, TOO_FEW

_BASELINE = f"the {BASELINE}"
MOST_NAMES = 2  # settings named in a sentence; if there are more, only their number
_LEVELS = {"faster": "good", "slower": "bad"}


def comparison_headline(comparison: Comparison) -> Headline:
    """How B changes the time of A, and which part of the step explains it."""
    key = comparison.verdict.replace(" ", "_")
    return Headline(key, _sentence(comparison), _evidence(comparison), _level(comparison))


def experiment_headline(experiment: Experiment) -> Headline:
    """The fastest of several settings, or that none is faster."""
    if len(experiment.comparisons) == 1:
        return comparison_headline(experiment.comparisons[0])
    if not experiment.comparisons:
        return Headline("not_comparable", "No setting was compared.", _stopped(experiment) or "Nothing ran.", "unknown")
    best = fastest(experiment.comparisons)
    if best is None:
        return _none_faster(experiment)
    count = len(experiment.comparisons) + 1
    speed, more = _speed(best, f" over {_name(best.a)}"), f"{cost_sentence(best)}{because(best)}"
    sentence = f"Faster: {_name(best.b)} is the fastest of {count} settings, {speed}{_around(best)}.{more}"
    rivals = [_name(c.b) for c in experiment.comparisons if c is not best and _overlaps(c, best)]
    evidence = f"Tied with it (overlapping intervals): {', '.join(rivals)}." if rivals else _evidence(best)
    figures = filter(None, (evidence, _failed(experiment), _stopped(experiment)))
    return Headline("faster", sentence, " ".join(figures), _level(best))


def _level(comparison: Comparison) -> str:
    return _LEVELS.get(comparison.verdict, "unknown") if pays(comparison) else "unknown"


def _sentence(comparison: Comparison) -> str:
    """The verdict first, then the one figure that supports it."""
    name = _name(comparison.b)
    if comparison.verdict == "not comparable":
        if (comparison.b.failure or "").startswith(NO_EFFECT):
            return f"{_capital(name)} has {comparison.b.failure}."
        return f"{_capital(name)} cannot be compared with {_name(comparison.a)}: {_why_not(comparison)}."
    said = f"{capitalized(comparison.verdict)}: {name}"
    other = "" if _is_baseline(comparison.a) else _name(comparison.a)
    if comparison.verdict == "slower":
        return f"{said} is {_slower(comparison, other)}.{cost_sentence(comparison)}{because(comparison)}"
    speed = _speed(comparison, other and f" over {other}")
    if comparison.verdict == "faster":
        return f"{said} gives a {speed}{_around(comparison)}.{cost_sentence(comparison)}{because(comparison)}"
    if comparison.verdict == "no measurable difference":
        band = f"less than {percent(EQUIVALENT)} counts as none"
        return f"{said} gives a {speed}{_around(comparison, band)}."
    return f"{said} {_undecided_words(comparison, speed)}."


def _undecided_words(comparison: Comparison, speed: str) -> str:
    """The measured ratio, and why it decides nothing."""
    if comparison.interval is None:
        return f"gave a {speed}, but too few blocks ran to tell"
    interval = f"the 95 % interval is {_bounds(comparison)}"
    count = (
        comparison.pairs
        if comparison.evidence == "interleaved"
        else min(len(comparison.a.blocks), len(comparison.b.blocks))
    )
    if comparison.interval is None or count < TOO_FEW:
        return f"gives a {speed} so far, but too few blocks ran to tell: {interval}"
    if comparison.interval[0] <= 1 <= comparison.interval[1]:
        return f"gives a {speed}, but {interval}"
    itself = f"{_name(comparison.a).removeprefix('the ')} vs. itself"
    why = f"run-to-run noise is {percent(comparison.noise_floor)} ({itself})"
    if not _beneath_floor(comparison):
        why = "that is too small to call a difference, and too large to call none"
    return f"gives a {speed}{_around(comparison)}, but {why}"


def _beneath_floor(comparison: Comparison) -> bool:
    assert comparison.interval is not None
    low, high = comparison.interval
    edge = 1 + (comparison.noise_floor or 0.0)
    return high >= 1 / edge and low <= edge


def _speed(comparison: Comparison, than: str = "") -> str:
    """ "2.9× speedup per sample"; below 1 is slower."""
    assert comparison.ratio is not None, "without a ratio nothing is comparable"
    middle, _ = speed_within(comparison.ratio, comparison.interval)
    return f"{middle}× speedup{than} per {comparison.unit}"


def _slower(comparison: Comparison, than: str) -> str:
    """ "2.0× slower per step (95 % interval 1.8–2.2)"."""
    assert comparison.ratio is not None, "a verdict has a ratio"
    middle, around = factor_within(comparison.ratio, comparison.interval)
    return f"{middle}× slower{than and f' than {than}'} per {comparison.unit} (95 % interval {around})"


def _around(comparison: Comparison, more: str = "") -> str:
    return f" (95 % interval {_bounds(comparison)}{'; ' if more else ''}{more})"


def _bounds(comparison: Comparison) -> str:
    assert comparison.ratio is not None and comparison.interval is not None, "a verdict has both"
    return speed_within(comparison.ratio, comparison.interval)[1]


def _evidence(comparison: Comparison) -> str:
    early = comparison.ended_early if comparison.ratio is not None else ""
    sentences = [f"{early}." if early else "", _measured(comparison), _predicted(comparison)]
    if comparison.verdict == "undecided":
        sentences.append(_what_would_decide(comparison))
    elif comparison.verdict == "not comparable" and comparison.ratio is not None:
        around = "" if comparison.interval is None else _around(comparison)
        sentences.append(f"By steps alone: {_speed(comparison)}{around}.")
    elif comparison.noise_floor is not None and comparison.verdict in _LEVELS:
        sentences.append(f"Run-to-run noise {percent(comparison.noise_floor)}.")
    if comparison.loss is not None and comparison.loss.moved:
        sentences.append(f"{comparison.loss.words}.")
    return " ".join(filter(None, sentences))


def _what_would_decide(comparison: Comparison) -> str:
    """How many pairs would decide it, if that many are feasible."""
    if comparison.ratio is None or comparison.evidence != "interleaved" or comparison.pairs < TOO_FEW:
        return ""
    pairs = comparison.pairs_to_decide
    if pairs is None:
        return "More blocks would hardly decide it: try again on a quieter machine."
    return f"About {pairs} pairs would decide it, if the machine stays as busy as it was."


def _predicted(comparison: Comparison) -> str:
    prediction = comparison.b.prediction
    if prediction is None or prediction.only_sign or comparison.ratio is None:
        return ""
    if prediction.ratio is None or prediction.interval is None:
        return ""
    middle, around = speed_within(prediction.ratio, prediction.interval)
    return f"Predicted before it ran, from this experiment's baseline: {middle}× ({around})."


def _measured(comparison: Comparison) -> str:
    if comparison.verdict == "not comparable" and comparison.ratio is None:
        return "Nothing was compared."
    if comparison.evidence == "interleaved":
        return f"Median of {plural(comparison.pairs, 'interleaved pair')} of blocks, in random order."
    return "The runs were sequential: weaker evidence than interleaved blocks."


def _why_not(comparison: Comparison) -> str:
    for side in (comparison.b, comparison.a):
        if side.failure:
            return side.failure if side is comparison.b else f"{_name(side)}: {side.failure}"
    if comparison.ended_early and comparison.ratio is None:
        return _continued(comparison.ended_early)
    stepless = {
        _name(side): next((m.reason for m in side.facts.run.missing if m.key == "empty_loader"), "")
        for side in (comparison.a, comparison.b)
        if side.facts is not None and not len(side.facts.run.steps)
    }
    if stepless:
        return next(filter(None, stepless.values()), f"no training step was found in {' and '.join(stepless)}")
    if comparison.notes:
        return _continued(comparison.notes[0])
    return "no step of both could be measured"


def _none_faster(experiment: Experiment) -> Headline:
    measured = [c for c in experiment.comparisons if c.ratio is not None and c.verdict != "not comparable"]
    base, count = _name(experiment.sides[0]), len(experiment.comparisons)
    more = [_failed(experiment), _stopped(experiment)]
    quickest = min(measured, key=lambda c: c.ratio or 1.0, default=None)
    if quickest is None:
        why = dict.fromkeys(c.notes[0] for c in experiment.comparisons if c.ratio is not None and c.notes)
        sentence = f"None of {count} settings could be compared with {base}."
        return Headline("not_comparable", sentence, " ".join(filter(None, [*why, *more])), "unknown")
    around = "" if quickest.interval is None else _around(quickest)
    more.insert(0, f"The fastest is {_name(quickest.b)}: {_speed(quickest)}{around}.")
    undecided = [_name(c.b) for c in measured if c.verdict == "undecided"]
    if undecided:
        sentence = f"Undecided: none of {count} settings is faster than {base} for certain, and {_may(undecided)}."
    else:
        sentence = f"None of {count} settings is faster than {base}."
    key = "undecided" if undecided else "no_measurable_difference"
    return Headline(key, sentence, " ".join(filter(None, more)), "unknown")


def _may(names: list[str]) -> str:
    """ "a=1 and b=2 may be"; if there are many, only their number."""
    who = f"{len(names)} of them" if len(names) > MOST_NAMES else " and ".join(names)
    return f"{who} may be"


def _failed(experiment: Experiment) -> str:
    alike: dict[str, list[str]] = {}
    for side in experiment.sides:
        if side.failure:
            alike.setdefault(side.failure, []).append(_name(side))
    failed = [f"{', '.join(names)}: {why}" for why, names in alike.items()]
    return f"{'; '.join(failed)}." if failed else ""


def _stopped(experiment: Experiment) -> str:
    return "Stopped before all blocks had run." if experiment.stopped else ""


def _overlaps(a: Comparison, b: Comparison) -> bool:
    if a.interval is None or b.interval is None or a.unit != b.unit:
        return False
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _is_baseline(side: Side) -> bool:
    return not side.settings and side.label == BASELINE


def _name(side: Side) -> str:
    return _BASELINE if _is_baseline(side) else side.label


def _capital(text: str) -> str:
    """Capitalize the beginning of a sentence, unless it is a name from the user's code."""
    return capitalized(text) if text == _BASELINE else text


def _continued(note: str) -> str:
    return decapitalized(note).rstrip(".")


NO_SINGLE_PART = " No single part of the step explains the difference."
NOT_CLEAR = " The traced steps are too few, or too uneven, to say which part of the step changed."
LEAST_COVERED = 1 / 3  # of the measured difference: a part that covers less is not its cause
DISTURBED = " CPU contention in the traced runs hides which part of the step changed."
SHORT_OF_CORES = " The traced runs were short of CPU cores, which hides what part of the step changed."
CORE_WAIT = 0.05  # of a step, chosen by gpulab: on a quiet machine a thread waits 1 to 3 % of its time for a core
_ODD = StepFlag.FIRST | StepFlag.PROFILER_EDGE | StepFlag.COMPILE | StepFlag.PARTIAL


def because(comparison: Comparison) -> str:
    """The part that changed most in the profiled runs, as a separate sentence.

    If no part covers a third of the difference, the sentence says so. Empty if the parts cannot be compared in the
    unit of the verdict, or if the profiled runs do not agree with the blocks.
    """
    per_sample = comparison.unit == "sample"
    divided = bool(comparison.parts)
    if not (divided or comparison.no_parts_reason) or (
        divided and per_sample and comparison.parts[0].a_us_per_sample is None
    ):
        return ""
    if hidden := disturbed(comparison.a) or disturbed(comparison.b):
        return hidden
    part = most_changed(comparison.parts, comparison.verdict, per_sample=per_sample)
    of_part = abs(change_us(part, per_sample=per_sample)) if part is not None else 0.0
    starts, of_starts = _epoch_starts(comparison)
    if max(of_part, of_starts) <= LEAST_COVERED * abs(_difference_us(comparison)):
        return _unnamed(comparison, per_sample) if divided else ""
    if part is None or of_starts > of_part:
        return f" {capitalized(starts)}."
    change = _change(*both_us(part, per_sample=per_sample))
    return f" {capitalized(part.label)} {change} per {comparison.unit} (split as in {ONE_RUN_EACH})."


def disturbed(side: Side) -> str:
    """A sentence if the profiled steps waited for a core, which lengthens any part, whatever the settings.

    Empty if they did not, or if the program's own threads and workers used all cores: that wait belongs to the program.
    """
    shares, cores = (None, None) if side.facts is None else (side.facts.shares, side.facts.cores)
    if shares is None or shares.of("core_wait") < CORE_WAIT:
        return ""
    others = cores.others_fraction if cores is not None else None
    if others is None:
        return SHORT_OF_CORES
    return DISTURBED if others >= LEAST_OTHERS else ""


def _unnamed(comparison: Comparison, per_sample: bool) -> str:
    """A sentence if no named part covers the difference."""
    difference_us = _difference_us(comparison)
    covers = [
        part
        for part in comparison.parts
        if change_us(part, per_sample=per_sample) / (difference_us or math.inf) > LEAST_COVERED
    ]
    unknown = next((part for part in covers if part.name == "unknown" and part.grew is not None), None)
    if unknown is None:
        return NOT_CLEAR if covers else NO_SINGLE_PART
    change = _change(*both_us(unknown, per_sample=per_sample))
    return f" Time that the trace does not name (unknown) {change} per {comparison.unit} (split as in {ONE_RUN_EACH})."


def _difference_us(comparison: Comparison) -> float:
    """The difference between B and A, in the unit of the comparison."""
    of_a = comparison.a.us_per_sample if comparison.unit == "sample" else comparison.a.us_per_step
    return (of_a or 0.0) * ((comparison.ratio or 1.0) - 1)


def _epoch_starts(comparison: Comparison) -> tuple[str, float]:
    """How the first steps of epochs changed, in words, and by how much that shifts the mean step or sample, in µs.

    Empty if they changed against the verdict. The breakdown leaves these steps out: they count as odd.
    """
    if comparison.a.facts is None or comparison.b.facts is None:
        return "", 0.0
    (first_a, more_a), (first_b, more_b) = (
        _first_steps(side, comparison.unit) for side in (comparison.a.facts, comparison.b.facts)
    )
    change = more_b - more_a
    if not first_a or not first_b or (change > 0) != (comparison.verdict == "slower"):
        return "", 0.0
    return f"the first step of each epoch {_change(first_a, first_b)} ({ONE_RUN_EACH})", abs(change)


def _first_steps(figures: Facts, unit: str) -> tuple[float, float]:
    """The mean first step of an epoch, and how much these steps add to the mean step (or sample), in µs; 0 if none."""
    steps = figures.run.steps
    counts = ((steps.flags & _ODD) == 0) & (steps.phase != Phase.TRACED)
    first = counts & ((steps.flags & StepFlag.EPOCH_START) != 0)
    others = counts & ~first
    if not first.any() or not others.any():
        return 0.0, 0.0
    wall_us = steps.time_ns / 1e3
    longer = float(wall_us[counts].mean() - wall_us[others].mean())
    samples = float(np.mean(steps.sample_count[counts])) if unit == "sample" else 1.0
    return float(wall_us[first].mean()), longer / samples if samples > 0 else 0.0


def _change(before_us: float, after_us: float) -> str:
    """ "grew from 1.20 ms to 3.40 ms": both times in one unit, so that they compare at a glance."""
    before, after = durations(before_us, after_us)
    return f"{'grew' if after_us > before_us else 'shrank'} from {before} to {after}"
