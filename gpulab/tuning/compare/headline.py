"""The one sentence that a comparison says at a glance, with the figures that carry it."""

from __future__ import annotations

import numpy as np

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.headline import Headline
from gpulab.formatting import durations, factor, factor_within, percent, plural
from gpulab.run import Phase, StepFlag
from gpulab.tuning.compare.parts import both_us, change_us, most_changed
from gpulab.tuning.compare.statistics import TOO_FEW
from gpulab.tuning.record import LEAST_EFFECT, Comparison, Experiment, Side

AS_WRITTEN = "the cell as written"
WIDE = 0.1  # "no difference" is read as "less than a tenth": where more is possible, it is not said
_LEVELS = {"faster": "good", "slower": "bad"}


def comparison_headline(found: Comparison) -> Headline:
    """What B does to the time of A, and which part of the step explains it."""
    key = found.verdict.replace(" ", "_")
    return Headline(key, _sentence(found), _evidence(found), _LEVELS.get(found.verdict, "unknown"))


def experiment_headline(found: Experiment) -> Headline:
    """The fastest of several settings, or that none is faster."""
    if len(found.comparisons) == 1:
        return comparison_headline(found.comparisons[0])
    if not found.comparisons:
        return Headline("not_comparable", "No setting was compared.", _stopped(found) or "Nothing ran.", "unknown")
    faster = [c for c in found.comparisons if c.verdict == "faster"]
    if not faster:
        return _none_faster(found)
    best = min(faster, key=lambda c: c.ratio or 1.0)
    named = _name(best.b)
    count = len(found.comparisons) + 1
    sentence = f"{named} is the fastest of {count} settings: {_times(best)} than {_name(best.a)}{because(best)}."
    rivals = [_name(c.b) for c in found.comparisons if c is not best and _overlaps(c, best)]
    evidence = f"Not to be told from it (their intervals overlap): {', '.join(rivals)}." if rivals else _evidence(best)
    return Headline("faster", sentence, " ".join(filter(None, (evidence, _failed(found), _stopped(found)))), "good")


def smallest_effect(found: Comparison) -> float | None:
    """The smallest relative change of the time that this comparison excludes where it finds none; None: none at all.

    As far as the interval reaches from 1, on its further side: it is not symmetric.
    """
    if found.interval is None:
        return None
    low, high = found.interval
    return max(LEAST_EFFECT, found.noise_floor or 0.0, abs(1 - low), abs(high - 1))


def _sentence(found: Comparison) -> str:
    named = _name(found.b)
    if found.verdict == "not comparable":
        return f"{_capital(named)} cannot be compared with {_name(found.a)}: {_why_not(found)}."
    than = "" if _is_as_written(found.a) else f" than {_name(found.a)}"
    if found.verdict in _LEVELS:
        return f"{_capital(named)} is {_times(found)}{than}{because(found)}."
    so_far = f"{_ratio_words(found)}{_floor_words(found)}"
    if _few(found):
        return f"Too few blocks ran to tell whether {named} changes the time per {found.unit}: {so_far}."
    compared = "" if _is_as_written(found.a) else f" compared with {_name(found.a)}"
    if (smallest_effect(found) or 0.0) > WIDE:
        return f"Whether {named} changes the time per {found.unit}{compared} cannot be told: {so_far}."
    return f"{_capital(named)} makes no measurable difference{compared}: {so_far}."


def _times(found: Comparison) -> str:
    """ "2.9× faster per sample (95 % interval 2.7–3.1×)": how many times as fast, or as slow."""
    assert found.ratio is not None and found.interval is not None, "a verdict has both"
    low, high = found.interval
    ratio, interval = (
        (found.ratio, found.interval) if found.verdict == "slower" else (1 / found.ratio, (1 / high, 1 / low))
    )
    middle, around = factor_within(ratio, interval)
    return f"{middle}× {found.verdict} per {found.unit} (95 % interval {around}×)"


def _ratio_words(found: Comparison) -> str:
    assert found.ratio is not None, "without a ratio nothing is comparable"
    if found.interval is None:
        return f"{factor(found.ratio)}× the time per {found.unit}"
    middle, around = factor_within(found.ratio, found.interval)
    return f"{middle}× the time per {found.unit} (95 % interval {around})"


def _floor_words(found: Comparison) -> str:
    return "" if found.noise_floor is None else f", noise floor {percent(found.noise_floor)}"


def _evidence(found: Comparison) -> str:
    said = [f"{found.ended_early}." if found.ended_early and found.ratio is not None else "", _measured(found)]
    said.append(_foretold(found))
    if found.verdict == "no measurable difference":
        smallest = smallest_effect(found)
        if smallest is not None:
            said.append(f"A change of less than {percent(smallest)} cannot be told from noise here.")
    elif found.verdict == "not comparable" and found.ratio is not None:
        said.append(f"Of a step alone: {_ratio_words(found)}.")
    elif found.noise_floor is not None and found.verdict in _LEVELS:
        said.append(f"Noise floor {percent(found.noise_floor)}.")
    if found.loss is not None and found.loss.verdict in ("different", "outside the band"):
        said.append(f"{found.loss.words}.")
    return " ".join(filter(None, said))


def _foretold(found: Comparison) -> str:
    made = found.b.prediction
    if made is None or made.ratio is None or made.interval is None or made.only_sign or found.ratio is None:
        return ""
    middle, around = factor_within(1 / made.ratio, (1 / made.interval[1], 1 / made.interval[0]))
    return f"Predicted before it ran: {middle}× as fast ({around}×)."


def _measured(found: Comparison) -> str:
    if found.verdict == "not comparable" and found.ratio is None:
        return "Nothing was compared."
    if found.evidence == "interleaved":
        return f"Median of {plural(found.pairs, 'pair')} of blocks that ran in turn, in random order."
    return "The runs were made one after the other: weaker evidence than blocks in turn."


def _why_not(found: Comparison) -> str:
    for side in (found.b, found.a):
        if side.failure:
            return side.failure if side is found.b else f"{_name(side)}: {side.failure}"
    if found.ended_early and found.ratio is None:
        return _continued(found.ended_early)
    stepless = [_name(side) for side in (found.a, found.b) if side.facts is not None and not len(side.facts.run.steps)]
    if stepless:
        return f"no training step was found in {' and '.join(stepless)}"
    if found.notes:
        return _continued(found.notes[0])
    return "no step of both could be measured"


def _none_faster(found: Experiment) -> Headline:
    told = [c for c in found.comparisons if c.ratio is not None and c.verdict != "not comparable"]
    subject = f"None of {len(found.comparisons)} settings is measurably faster than {_name(found.sides[0])}"
    quickest = min(told, key=lambda c: c.ratio or 1.0, default=None)
    if quickest is None:
        why = dict.fromkeys(c.notes[0] for c in found.comparisons if c.ratio is not None and c.notes)
        said = [*why, _failed(found), _stopped(found)]
        return Headline(
            "not_comparable", f"{subject}: none could be compared.", " ".join(filter(None, said)), "unknown"
        )
    said = [
        f"The quickest is {_name(quickest.b)}: {_ratio_words(quickest)}{_floor_words(quickest)}.",
        _failed(found),
        _stopped(found),
    ]
    return Headline("no_measurable_difference", f"{subject}.", " ".join(filter(None, said)), "unknown")


def _failed(found: Experiment) -> str:
    alike: dict[str, list[str]] = {}
    for side in found.sides:
        if side.failure:
            alike.setdefault(side.failure, []).append(_name(side))
    failed = [f"{', '.join(names)}: {why}" for why, names in alike.items()]
    return f"{'; '.join(failed)}." if failed else ""


def _stopped(found: Experiment) -> str:
    return "Stopped before all blocks had run." if found.stopped else ""


def _overlaps(a: Comparison, b: Comparison) -> bool:
    if a.interval is None or b.interval is None or a.unit != b.unit:
        return False
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _few(found: Comparison) -> bool:
    count = found.pairs if found.evidence == "interleaved" else min(len(found.a.blocks), len(found.b.blocks))
    return found.interval is None or count < TOO_FEW


def _is_as_written(side: Side) -> bool:
    return not side.settings and side.label == "as written"


def _name(side: Side) -> str:
    return AS_WRITTEN if _is_as_written(side) else side.label


def _capital(text: str) -> str:
    """A sentence's beginning, where it is our own word and no name of the user's."""
    return text[:1].upper() + text[1:] if text == AS_WRITTEN else text


def _continued(note: str) -> str:
    return note[:1].lower() + note[1:].rstrip(".")


LEAST_COVERED = 1 / 3  # of the measured difference: what covers less of it is not its cause
_ODD = StepFlag.FIRST | StepFlag.PROFILER_EDGE | StepFlag.COMPILE | StepFlag.PARTIAL


def because(found: Comparison) -> str:
    """What changed most, as the end of a sentence; that no part shows it, where none covers a third of the difference.

    Empty where the parts cannot be compared in the unit of the verdict.
    """
    per_sample = found.unit == "sample"
    if not found.parts or (per_sample and found.parts[0].a_us_per_sample is None):
        return ""
    part = most_changed(found.parts, found.verdict, per_sample=per_sample)
    of_part = abs(change_us(part, per_sample=per_sample)) if part is not None else 0.0
    starts, of_starts = _epoch_starts(found)
    if max(of_part, of_starts) <= LEAST_COVERED * abs(_difference_us(found)):
        return _unnamed(found, per_sample)
    if part is None or of_starts > of_part:
        return f": {starts}"
    return f": {part.label} {_change(*both_us(part, per_sample=per_sample))} of each {found.unit}"


def _unnamed(found: Comparison, per_sample: bool) -> str:
    """Where no part that has a name covers the difference."""
    unknown = next((part for part in found.parts if part.name == "unknown"), None)
    if unknown is None or unknown.grew is not (found.verdict == "slower"):
        return ": the parts of the profiled steps do not show where"
    if abs(change_us(unknown, per_sample=per_sample)) <= LEAST_COVERED * abs(_difference_us(found)):
        return ": the parts of the profiled steps do not show where"
    change = _change(*both_us(unknown, per_sample=per_sample))
    return f": what the trace does not name (unknown) {change} of each {found.unit}"


def _difference_us(found: Comparison) -> float:
    """Of B and A, in the unit of the comparison."""
    of_a = found.a.us_per_sample if found.unit == "sample" else found.a.us_per_step
    return (of_a or 0.0) * ((found.ratio or 1.0) - 1)


def _epoch_starts(found: Comparison) -> tuple[str, float]:
    """How the first steps of epochs changed, in words; and by how much that moves the mean step or sample, in µs.

    Nothing where they changed the other way than the verdict has it. No accounting has these steps: they are odd ones.
    """
    if found.a.facts is None or found.b.facts is None:
        return "", 0.0
    (first_a, more_a), (first_b, more_b) = (_first_steps(side, found.unit) for side in (found.a.facts, found.b.facts))
    change = more_b - more_a
    if not first_a or not first_b or (change > 0) != (found.verdict == "slower"):
        return "", 0.0
    return f"the first step of each epoch {_change(first_a, first_b)}", abs(change)


def _first_steps(known: Facts, unit: str) -> tuple[float, float]:
    """The mean first step of an epoch, and how much longer the mean step (or sample) is by these, in µs; 0 if none."""
    steps = known.run.steps
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
    """ "grew from 1.20 ms to 3.40 ms": two times in one unit, so that they compare at a glance."""
    before, after = durations(before_us, after_us)
    return f"{'grew' if after_us > before_us else 'shrank'} from {before} to {after}"
