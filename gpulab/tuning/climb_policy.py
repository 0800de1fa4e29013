"""Which setting a climb tries next, and whether it is kept. Pure.

It tries what the diagnosis names, then other knobs against the same cause. It keeps what is faster for certain where
the training stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeGuard

from msgspec import Struct, field

from gpulab.analysis.facts import Facts
from gpulab.diagnosis.finding import Diagnosis, Finding
from gpulab.errors import UsageError
from gpulab.formatting import decapitalized, factor, percent, plural, speed_within
from gpulab.knobs.catalogue import KNOBS, changes_steps, knobs_against
from gpulab.knobs.knob import Knob, StepTimes, Value
from gpulab.knobs.loader_options import with_settings
from gpulab.knobs.observation import Observation
from gpulab.knobs.variables import Plain, plain_value
from gpulab.prediction.prediction import Prediction
from gpulab.thresholds import DEFAULT
from gpulab.tuning.climb_record import Outcome, Passed
from gpulab.tuning.plan import SCREENING_TURNS, Arm
from gpulab.tuning.record import Comparison, Experiment, LossComparison, Side
from gpulab.verdict import LEAST_EFFECT, TOO_FEW

ANOTHER_TRAINING = "{why}: --allow {names} lets it be tried"
NUMBERS_SCREENED = 2  # values of a knob that is a number: the likeliest is now and then one too many
CLEARLY = 1.1  # times the time of a step: so much slower in one pair of short blocks is slower
_AGAIN: tuple[Outcome, ...] = ("no gain", "unsure", "slower")  # what may be otherwise once another cause is cured

Predict = Callable[[Mapping[str, str]], Prediction]


class Tried(Struct, frozen=True):
    """A try of before: what was set on top of which settings, and what came of it: time of a step over before."""

    settings: Mapping[str, Plain]
    base: Mapping[str, Plain]
    outcome: Outcome
    ratio: float | None = None


class ClimbState(Struct, frozen=True):
    """Where the climb stands. `observation`: of the baseline; `facts`: of the cell with all that is kept."""

    facts: Facts
    observation: Observation
    kept: Mapping[str, Plain]
    tried: Sequence[Tried] = ()
    cores: float = 1.0  # that this process may use
    without: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()


class Candidate(Struct, frozen=True):
    """A setting worth a try. `gain_us`: of a step, predicted, else the most that its finding could give back."""

    settings: Mapping[str, Plain]
    finding: Finding | None  # None: none names it, earlier blocks of it looked faster
    prediction: Prediction | None
    gain_us: float
    back: tuple[str, ...] = ()  # kept knobs that it sets back to the baseline

    @property
    def slow_to_prepare(self) -> bool:
        """Whether a short block of it would show nothing but its preparation."""
        return any(name in KNOBS and KNOBS[name].slow_to_prepare for name in self.settings)

    def on_top_of(self, kept: Mapping[str, Plain]) -> Arm:
        """All settings of the try; what was kept first, in the order of the climb."""
        old = {name: value for name, value in kept.items() if name not in self.settings}
        return Arm({**old, **{name: value for name, value in self.settings.items() if name not in self.back}})


class _Sorted(Struct):
    able: list[Candidate] = field(default_factory=list)
    passed: list[Passed] = field(default_factory=list)

    def pass_over(self, label: str, why: str) -> None:
        if label not in (p.label for p in self.passed):
            self.passed.append(Passed(label, why.rstrip(".")))


def candidates(diagnosis: Diagnosis, state: ClimbState, predict: Predict) -> tuple[list[Candidate], list[Passed]]:
    """What to try, the most promising first, and what will not be tried and why.

    First what the findings themselves name, by the time that it would give back; where nothing of that is left, other
    knobs against the same causes; then findings that had to wait for another, against which nothing is left.
    `predict` predicts a setting on top of the facts of the state.
    """
    chosen = _Sorted()
    keys = {finding.key for finding in diagnosis.findings}
    first = [f for f in diagnosis.findings if not keys & set(f.only_after)]
    for findings in (first, [f for f in diagnosis.findings if f not in first]):
        for finding in findings:
            if finding.settings:
                _consider(_parsed(finding, chosen), finding, state, predict, chosen, named=True)
        for finding in () if chosen.able else findings:
            for knob in knobs_against(finding.key):
                value = next(_next_values(knob, state), None)
                if value is not None:
                    _consider({knob.name: value}, finding, state, predict, chosen, named=False)
        if chosen.able:
            break
    chosen.able.sort(key=lambda candidate: -candidate.gain_us)
    return chosen.able, chosen.passed


def others(state: ClimbState, predict: Predict) -> tuple[list[Candidate], list[Passed]]:
    """Every other knob that can act on the cell and leaves the training as it is, with its next value, of numbers two.

    What a prediction says orders them and excludes nothing: a few short blocks of each are cheap.
    """
    chosen = _Sorted()
    for new in _screened_settings(state):
        name = next(iter(new))
        label = Arm(new).label
        why = "left out as asked (--without)" if name in state.without else ""
        why = why or _another_training(new, state.allow) or _refusal(new, state)
        if why:
            chosen.pass_over(label, why)
            continue
        prediction = predict(Arm(new).shown)
        gain_us = 0.0 if prediction.ratio is None else (1 - prediction.ratio) * _step_us(state.facts)
        chosen.able.append(Candidate(new, None, prediction, gain_us))
    chosen.able.sort(key=lambda candidate: -candidate.gain_us)
    return chosen.able, chosen.passed


def _screened_settings(state: ClimbState) -> Iterator[dict[str, Plain]]:
    for knob in KNOBS.values():
        values = list(islice(_next_values(knob, state), NUMBERS_SCREENED))
        for value in values if all(map(_is_number, values)) else values[:1]:
            new: dict[str, Plain] = {knob.name: value}
            if not _is_set(knob.name, value, state) and _worth_another_try(new, state, named=False):
                yield new


def promising(screened: Experiment, arms: Sequence[Candidate]) -> tuple[list[Candidate], list[Passed]]:
    """Of what was screened the settings that looked faster, the fastest first, then those of which too few pairs of
    blocks were measured, for the time was over: nothing speaks against them. And what the others showed."""
    faster: list[tuple[float, Candidate]] = []
    unmeasured: list[Candidate] = []
    passed: list[Passed] = []
    for candidate, comparison in zip(arms, screened.comparisons, strict=True):
        label = Arm(candidate.settings).label
        pairs, ratio = comparison.pairs, comparison.ratio
        thin = not pairs or (ratio is not None and pairs < SCREENING_TURNS and 1 - LEAST_EFFECT < ratio < CLEARLY)
        a = comparison.a.facts
        if thin and not comparison.b.failure and a is not None and len(a.run.steps):
            unmeasured.append(candidate)
        elif ratio is None:
            why = comparison.b.failure or (comparison.notes[0] if comparison.notes else "no block of it was measured")
            passed.append(Passed(label, f"screened: {why}".rstrip(".")))
        elif ratio > 1 - LEAST_EFFECT:
            shown = f"{factor(1 / ratio)}× speedup in {plural(pairs, 'short block')}"
            passed.append(Passed(label, f"screened: {shown}, so it was not tried further"))
        else:
            faster.append((ratio, candidate))
    return [*(candidate for _, candidate in sorted(faster, key=lambda pair: pair[0])), *unmeasured], passed


def ways_back(diagnosis: Diagnosis, state: ClimbState, predict: Predict) -> list[Candidate]:
    """Options of the DataLoader that another, kept later, may have made needless: without them, what is it like?

    A cache, for one, makes workers a burden: each batch then only travels between processes.
    """
    loading = [name for name in state.kept if name in KNOBS and KNOBS[name].kind == "DataLoader option"]
    ways = []
    for name in loading[:-1]:
        before = KNOBS[name].value_in(state.observation)
        if changes_steps(name) or before is None:
            continue
        back = (name, *(n for n in state.kept if n in KNOBS and name in KNOBS[n].needs))
        settings: dict[str, Plain] = {n: KNOBS[n].value_in(state.observation) for n in back}
        if any(t.settings == settings and dict(t.base) == dict(state.kept) for t in state.tried):
            continue
        prediction = predict(Arm({name: before}).shown)
        finding = diagnosis.first
        ways.append(Candidate(settings, finding, prediction, _gain_us(finding, prediction, state), back))
    return ways


def together(state: ClimbState, predict: Predict) -> list[Candidate]:
    """All at once what looked faster and was not so for certain: small gains add up to one that blocks can tell."""
    hopeful: dict[str, Plain] = {}
    unsure = [(t.ratio, t) for t in state.tried if t.outcome == "unsure" and t.ratio is not None]
    for ratio, tried in sorted(unsure, key=lambda pair: -pair[0]):  # of two values of a knob the faster one
        free = not set(tried.settings) & {*state.kept, *state.without}
        if ratio < 1 - LEAST_EFFECT and free and not _refusal({**hopeful, **tried.settings}, state):
            hopeful |= tried.settings
    before = any(t.settings == hopeful and dict(t.base) == dict(state.kept) for t in state.tried)
    if not hopeful or before:
        return []
    return [Candidate(hopeful, None, predict(Arm(hopeful).shown), 0.0)]


def _parsed(finding: Finding, chosen: _Sorted) -> dict[str, Plain]:
    settings: dict[str, Plain] = {}
    for name, text in finding.settings:
        try:
            settings[name] = KNOBS[name].parse(text) if name in KNOBS else plain_value(text)
        except UsageError as e:
            chosen.pass_over(f"{name}={text}", str(e))
            return {}
    return settings


def _consider(
    settings: Mapping[str, Plain],
    finding: Finding,
    state: ClimbState,
    predict: Predict,
    chosen: _Sorted,
    *,
    named: bool,
) -> None:
    """Put it among those to try, or among those passed over; silently drop what is set already or was tried."""
    new = {name: value for name, value in settings.items() if not _is_set(name, value, state)}
    if not new or not _worth_another_try(new, state, named=named) or any(c.settings == new for c in chosen.able):
        return
    label = Arm(new).label
    left_out = [name for name in new if name in state.without]
    if left_out:
        return chosen.pass_over(label, "left out as asked (--without)")
    why = _another_training(new, state.allow) or _refusal(new, state)
    if why:
        return chosen.pass_over(label, why)
    prediction = predict(Arm(new).shown)
    if prediction.refused:
        prediction = finding.prediction if named and finding.prediction is not None else prediction
    if prediction.interval is not None and prediction.interval[0] > 1 - LEAST_EFFECT:
        low, high = (factor(1 / edge) for edge in reversed(prediction.interval))
        return chosen.pass_over(label, f"no gain predicted ({low}–{high}× speedup)")
    chosen.able.append(Candidate(new, finding, prediction, _gain_us(finding, prediction, state)))


def _gain_us(finding: Finding, prediction: Prediction, state: ClimbState) -> float:
    if prediction.ratio is not None and not prediction.only_sign:
        return (1 - prediction.ratio) * _step_us(state.facts)
    return finding.recoverable_us_per_step or 0.0


def _step_us(facts: Facts) -> float:
    step = facts.typical_step_us
    return step.median if step is not None else 0.0


# -- what cannot, or need not, be tried --------------------------------------------------------------------------------


def _now(name: str, state: ClimbState) -> Plain | None:
    """The value that the kept settings or the baseline have."""
    if name in state.kept:
        return state.kept[name]
    return KNOBS[name].value_in(state.observation) if name in KNOBS else None


def _is_set(name: str, value: Plain, state: ClimbState) -> bool:
    now = _now(name, state)
    return type(now) is type(value) and now == value


def _worth_another_try(new: Mapping[str, Plain], state: ClimbState, *, named: bool) -> bool:
    """It was not tried yet; or it brought nothing, and other settings were kept since and a finding names it again."""
    for tried in state.tried:
        if tried.settings == new and not (named and tried.outcome in _AGAIN and dict(tried.base) != dict(state.kept)):
            return False
    return True


def _another_training(new: Mapping[str, Plain], allow: frozenset[str]) -> str:
    names = [name for name in new if changes_steps(name) and name not in allow]
    if not names:
        return ""
    why = "; ".join(dict.fromkeys(KNOBS[name].changes_training for name in names))
    return ANOTHER_TRAINING.format(why=why, names=",".join(names))


def _refusal(new: Mapping[str, Plain], state: ClimbState) -> str:
    together = {
        n: v for n, v in {**state.kept, **new}.items() if n in KNOBS and isinstance(v, bool | int | float | str)
    }
    imagined = with_settings(state.observation, together)
    reasons = [KNOBS[name].refuses(imagined, value) for name, value in together.items() if name in new]
    return "; ".join(reason for reason in reasons if reason)


# -- the next value of a knob ------------------------------------------------------------------------------------------


def _next_values(knob: Knob, state: ClimbState) -> Iterator[Value]:
    """Values not tried yet, in order; of numbers none beyond one that was not kept: the way up ends there."""
    now = _now(knob.name, state)
    tried = [t for t in state.tried if knob.name in t.settings]
    lost = [t.settings[knob.name] for t in tried if t.outcome != "kept"]
    wait = state.facts.data_wait_us
    times = StepTimes(state.cores, _step_us(state.facts), wait.median if wait is not None else None)
    for value in knob.next_values(now if isinstance(now, bool | int | float | str) else None, times):
        if value == now or any(t.settings[knob.name] == value for t in tried):
            continue
        if _is_number(value) and any(_is_number(old) and value > old for old in lost):
            continue
        yield value


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


WORTH_HAVING = 0.1  # of the time: a gain that may be so large is looked for a second time
KEEPING = ("same", "within the band")


class Judged(Struct, frozen=True):
    """What becomes of a try, and why: a sentence without a full stop."""

    outcome: Outcome
    words: str


def spoiled(comparison: Comparison, names: Collection[str]) -> Judged | None:
    """What one full run of a try is enough to tell; None: it takes blocks. `names` are the knobs that it set."""
    if comparison.b.failure:
        return Judged("failed", comparison.b.failure)
    broken = broken_loss(comparison.a.losses, comparison.b.losses)
    if broken:
        return Judged("loss broken", broken)
    idle = [c for c in comparison.b.checks if c.name in names and c.state == "no effect"]
    if idle and len(idle) == len(names):
        return Judged("no effect", f"it had no effect: {idle[0].evidence}")
    return None


def judged(
    comparison: Comparison,
    loss: LossComparison | None,
    names: Collection[str],
    allow: Collection[str],
    memory_full: float = DEFAULT.memory_full,
) -> Judged:
    """The verdict on one try. `names` are the knobs it set, `allow` those that may change the training.

    From `memory_full` on, a fraction of the device's memory, a faster setting is not kept.
    """
    early = spoiled(comparison, names)
    if early is not None:
        return early
    if comparison.evidence == "sequential" and comparison.verdict != "not comparable":
        return Judged("unsure", "undecided, the budget left no time for interleaved blocks")
    if comparison.verdict != "faster":
        return _not_faster(comparison)
    share = _memory_share(comparison.b)
    if share >= memory_full:
        words = f"it takes {percent(share)} of the device's memory: the next larger batch would not fit"
        return Judged("memory", words)
    if loss is None or loss.verdict == "not measurable":
        return _not_known(names, allow)
    if loss.verdict not in KEEPING:
        words = decapitalized(loss.words).rstrip(".")
        if set(names) & set(allow):
            return Judged("kept", f"faster; {words}: kept because --allow says so")
        return Judged("loss moved", f"faster, but {words}; --allow {','.join(names)} keeps it all the same")
    same = (
        "is the same" if loss.verdict == "same" else f"moves no further than with another seed ({loss.seeds + 1} seeds)"
    )
    return Judged("kept", f"faster, and the loss {same}")


def unsure(comparison: Comparison) -> bool:
    """Undecided, and the measurements lie too far apart to exclude a gain worth having."""
    if comparison.verdict != "undecided":
        return False
    return comparison.interval is None or comparison.pairs < TOO_FEW or comparison.interval[0] < 1 - WORTH_HAVING


def broken_loss(a: Sequence[float], b: Sequence[float]) -> str:
    """From which step on B's loss is not a number, or infinite, where A's is finite; empty where it is not.

    The last step of a run may have been cut off before its loss.
    """
    for step, (of_a, of_b) in enumerate(zip(a[:-1], b[:-1], strict=False), start=1):
        if math.isfinite(of_a) and not math.isfinite(of_b):
            kind = "not a number (NaN)" if math.isnan(of_b) else "infinite"
            return f"the loss is {kind} from step {step} on"
    return ""


def _not_faster(comparison: Comparison) -> Judged:
    if comparison.verdict == "slower":
        return Judged("slower", "it is slower")
    if comparison.verdict == "not comparable" or comparison.ratio is None:
        why = comparison.notes[0] if comparison.notes else "the two cannot be compared"
        return Judged("not comparable", why.rstrip("."))
    if comparison.verdict == "no measurable difference":
        return Judged("no gain", "no measurable difference")
    if comparison.interval is None or comparison.pairs < TOO_FEW:
        return Judged("unsure", f"undecided, too few pairs of blocks ({comparison.pairs}) to tell")
    fastest = 1 / comparison.interval[0]
    if fastest < 1 + LEAST_EFFECT:
        return Judged("no gain", f"the speedup is at most {factor(fastest)}×")
    middle, around = speed_within(comparison.ratio, comparison.interval)
    return Judged("unsure", f"undecided: {middle}× speedup, 95 % interval {around}")


def _memory_share(side: Side) -> float:
    """Of the device's memory; 0 where it is not known."""
    memory = side.facts.run.memory if side.facts is not None else None
    if memory is None or not memory.total_bytes:
        return 0.0
    return (memory.peak_reserved_bytes or memory.peak_allocated_bytes or 0) / memory.total_bytes


def _not_known(names: Collection[str], allow: Collection[str]) -> Judged:
    """A loss that cannot be compared allows only what cannot change it."""
    changing = [name for name in names if name not in KNOBS or not KNOBS[name].same_training]
    if not changing:
        return Judged("kept", "faster; the loss could not be compared, and this changes only how data arrives")
    if set(changing) <= set(allow):
        return Judged("kept", "faster; the effect on the loss could not be measured: kept because --allow says so")
    words = "faster, but whether the loss stays the same could not be measured"
    return Judged("loss moved", f"{words}; --allow {','.join(changing)} keeps it all the same")
