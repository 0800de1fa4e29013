"""The one sentence that a comparison says at a glance, with the figures that carry it."""

from __future__ import annotations

from gpulab.diagnosis.headline import Headline
from gpulab.formatting import factor, factor_within, percent, plural
from gpulab.tuning.compare.cause import because
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
    """What was predicted before it ran."""
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
