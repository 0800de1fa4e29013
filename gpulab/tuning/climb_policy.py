"""Which setting a climb tries next, and whether it is kept. All functions are pure.

A climb tries the cures that the diagnosis names, then other knobs against the same cause. It keeps a setting if the
verdict is "faster" and the training stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeGuard

from msgspec import Struct

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
from gpulab.tuning.climb_record import Outcome, Skip
from gpulab.tuning.record import Comparison, Experiment, LossComparison, Side
from gpulab.tuning.schedule import SCREENING_TURNS, Arm
from gpulab.verdict import LEAST_EFFECT, TOO_FEW

ANOTHER_TRAINING = "{why}: --allow {names} lets it be tried"
WITHOUT = "left out as asked (--without)"
NUMBERS_SCREENED = 2  # values of a numeric knob: the likeliest one is sometimes too large
CLEARLY = 1.1  # ratio of step times that counts as slower after a single pair of short blocks
_AGAIN: tuple[Outcome, ...] = ("no gain", "unsure", "slower")  # may change once another cause is cured

Predict = Callable[[Mapping[str, str]], Prediction]


class Trial(Struct, frozen=True):
    """An earlier attempt: the settings, the base below them, the outcome, and the ratio of times."""

    settings: Mapping[str, Plain]
    base: Mapping[str, Plain]
    outcome: Outcome
    ratio: float | None = None


class ClimbState(Struct, frozen=True):
    """Where the climb stands. `observation`: of the baseline; `facts`: of the cell with all settings of `base`."""

    facts: Facts
    observation: Observation
    base: Mapping[str, Plain]  # settings that proved faster in earlier attempts
    trials: Sequence[Trial] = ()
    cores: float = 1.0  # that this process may use
    without: frozenset[str] = frozenset()
    allow: frozenset[str] = frozenset()


class Candidate(Struct, frozen=True):
    """A setting worth a try. `gain_us`: predicted gain per step, else the most that its finding could save."""

    settings: Mapping[str, Plain]
    finding: Finding | None  # None: proposed by a screening or by earlier attempts
    prediction: Prediction | None
    gain_us: float
    back: tuple[str, ...] = ()  # knobs of the base that are reset to the baseline

    @property
    def slow_to_prepare(self) -> bool:
        """Whether a short block would show nothing but preparation, such as compiling."""
        return any(name in KNOBS and KNOBS[name].slow_to_prepare for name in self.settings)

    def on_top_of(self, base: Mapping[str, Plain]) -> Arm:
        """All settings of the attempt; the settings of the base first, in the order of the climb."""
        old = {name: value for name, value in base.items() if name not in self.settings}
        return Arm({**old, **{name: value for name, value in self.settings.items() if name not in self.back}})


Proposal = Candidate | Skip | None


def candidates(diagnosis: Diagnosis, state: ClimbState, predict: Predict) -> tuple[list[Candidate], list[Skip]]:
    """The candidates, the most promising first, and what to skip, with the reason.

    First the settings that the findings themselves propose, by the time they would save; if none is left, other knobs
    against the same causes; then the findings that wait for another finding to be cured. `predict` predicts a setting
    on top of the facts of the state.
    """
    keys = {finding.key for finding in diagnosis.findings}
    first = [finding for finding in diagnosis.findings if not keys & set(finding.only_after)]
    waiting = [finding for finding in diagnosis.findings if finding not in first]
    proposals: list[Proposal] = []
    for findings in (first, waiting):
        for cures in (_own_cures, _other_cures):
            proposals += (cure for finding in findings for cure in cures(finding, state, predict))
            if any(isinstance(proposal, Candidate) for proposal in proposals):
                return _ranked(proposals)
    return _ranked(proposals)


def others(state: ClimbState, predict: Predict) -> tuple[list[Candidate], list[Skip]]:
    """Every other knob that can act on the cell without changing the training, with its next value (two for numbers).

    Predictions order the knobs and exclude none: a few short blocks of each are cheap.
    """
    proposals: list[Proposal] = []
    for knob in KNOBS.values():
        values = list(islice(_next_values(knob, state), NUMBERS_SCREENED))
        for value in values if all(map(_is_number, values)) else values[:1]:
            proposals.append(_proposal({knob.name: value}, None, state, predict))
    return _ranked(proposals)


def _own_cures(finding: Finding, state: ClimbState, predict: Predict) -> Iterator[Proposal]:
    """The settings that the finding itself proposes."""
    settings: dict[str, Plain] = {}
    for name, text in finding.settings:
        try:
            settings[name] = KNOBS[name].parse(text) if name in KNOBS else plain_value(text)
        except UsageError as e:
            yield Skip(f"{name}={text}", str(e).rstrip("."))
            return
    yield _proposal(settings, finding, state, predict, is_own=True)


def _other_cures(finding: Finding, state: ClimbState, predict: Predict) -> Iterator[Proposal]:
    """The next value of each knob against the same cause."""
    for knob in knobs_against(finding.key):
        for value in islice(_next_values(knob, state), 1):
            yield _proposal({knob.name: value}, finding, state, predict)


def _proposal(
    settings: Mapping[str, Plain],
    finding: Finding | None,
    state: ClimbState,
    predict: Predict,
    *,
    is_own: bool = False,
) -> Proposal:
    """A candidate, or why to skip it; None if it is set already or was tried. `is_own`: the finding proposes it."""
    new = {name: value for name, value in settings.items() if not _is_set(name, value, state)}
    if not new or not _worth_another_try(new, state, is_own=is_own):
        return None
    arm = Arm(new)
    why = WITHOUT if state.without & new.keys() else _another_training(new, state.allow) or _refusal(new, state)
    if why:
        return Skip(arm.label, why.rstrip("."))
    prediction = predict(arm.texts)
    if finding is not None:
        if prediction.refused and is_own and finding.prediction is not None:
            prediction = finding.prediction
        if prediction.interval is not None and prediction.interval[0] > 1 - LEAST_EFFECT:
            low, high = (factor(1 / edge) for edge in reversed(prediction.interval))
            return Skip(arm.label, f"no gain predicted ({low}–{high}× speedup)")
    return Candidate(new, finding, prediction, _gain_us(finding, prediction, state))


def _ranked(proposals: Iterable[Proposal]) -> tuple[list[Candidate], list[Skip]]:
    """The candidates, the most promising first, and the skips, each once."""
    candidates, skips = dict[str, Candidate](), dict[str, Skip]()
    for proposal in proposals:
        if isinstance(proposal, Candidate):
            candidates.setdefault(Arm(proposal.settings).label, proposal)
        elif proposal is not None:
            skips.setdefault(proposal.label, proposal)
    return sorted(candidates.values(), key=lambda candidate: -candidate.gain_us), list(skips.values())


def promising(screening: Experiment, arms: Sequence[Candidate]) -> tuple[list[Candidate], list[Skip]]:
    """After a screening: the settings that looked faster, the fastest first, then settings with too few pairs to judge.

    The second value: all other settings, each with its result as the reason to skip it.
    """
    faster: list[tuple[float, Candidate]] = []
    unmeasured: list[Candidate] = []
    skips: list[Skip] = []
    for candidate, comparison in zip(arms, screening.comparisons, strict=True):
        label = Arm(candidate.settings).label
        pairs, ratio = comparison.pairs, comparison.ratio
        thin = not pairs or (ratio is not None and pairs < SCREENING_TURNS and 1 - LEAST_EFFECT < ratio < CLEARLY)
        a = comparison.a.facts
        if thin and not comparison.b.failure and a is not None and len(a.run.steps):
            unmeasured.append(candidate)
        elif ratio is None:
            why = comparison.b.failure or (comparison.notes[0] if comparison.notes else "no block of it was measured")
            skips.append(Skip(label, f"screened: {why}".rstrip(".")))
        elif ratio > 1 - LEAST_EFFECT:
            speed = f"{factor(1 / ratio)}× speedup in {plural(pairs, 'short block')}"
            skips.append(Skip(label, f"screened: {speed}, so it was not tried further"))
        else:
            faster.append((ratio, candidate))
    return [*(candidate for _, candidate in sorted(faster, key=lambda pair: pair[0])), *unmeasured], skips


def ways_back(diagnosis: Diagnosis, state: ClimbState, predict: Predict) -> list[Candidate]:
    """Candidates that reset a DataLoader option which a later option may have made needless.

    A cache, for example, makes workers a burden: they only send each batch to another process.
    """
    loading = [name for name in state.base if name in KNOBS and KNOBS[name].kind == "DataLoader option"]
    ways, finding = [], diagnosis.first
    for name in loading[:-1]:
        before = KNOBS[name].value_in(state.observation)
        if changes_steps(name) or before is None:
            continue
        back = (name, *(n for n in state.base if n in KNOBS and name in KNOBS[n].needs))
        settings: dict[str, Plain] = {n: KNOBS[n].value_in(state.observation) for n in back}
        if not _is_repeat(settings, state):
            prediction = predict(Arm({name: before}).texts)
            ways.append(Candidate(settings, finding, prediction, _gain_us(finding, prediction, state), back))
    return ways


def together(state: ClimbState, predict: Predict) -> list[Candidate]:
    """One candidate of all settings that seemed faster but were undecided: small gains may be measurable together."""
    hopeful: dict[str, Plain] = {}
    unsure = [(t.ratio, t.settings) for t in state.trials if t.outcome == "unsure" and t.ratio is not None]
    for ratio, settings in sorted(unsure, key=lambda pair: -pair[0]):  # of two values of one knob the faster wins
        free = not set(settings) & {*state.base, *state.without}
        if ratio < 1 - LEAST_EFFECT and free and not _refusal({**hopeful, **settings}, state):
            hopeful |= settings
    if not hopeful or _is_repeat(hopeful, state):
        return []
    return [Candidate(hopeful, None, predict(Arm(hopeful).texts), 0.0)]


def _gain_us(finding: Finding | None, prediction: Prediction, state: ClimbState) -> float:
    if prediction.ratio is not None and (finding is None or not prediction.only_sign):
        return (1 - prediction.ratio) * step_times(state.facts, state.cores).step_us
    return (finding.recoverable_us_per_step if finding is not None else None) or 0.0


def step_times(facts: Facts, cores: float) -> StepTimes:
    """The times from which a knob derives its next values."""
    step, wait = facts.typical_step_us, facts.data_wait_us
    return StepTimes(cores, step.median if step is not None else 0.0, wait.median if wait is not None else None)


# -- what cannot, or need not, be tried --------------------------------------------------------------------------------


def _now(name: str, state: ClimbState) -> Plain | None:
    """The present value: from the base, else from the baseline."""
    if name in state.base:
        return state.base[name]
    return KNOBS[name].value_in(state.observation) if name in KNOBS else None


def _is_set(name: str, value: Plain, state: ClimbState) -> bool:
    now = _now(name, state)
    return type(now) is type(value) and now == value


def _is_repeat(settings: Mapping[str, Plain], state: ClimbState) -> bool:
    return any(trial.settings == settings and dict(trial.base) == dict(state.base) for trial in state.trials)


def _worth_another_try(new: Mapping[str, Plain], state: ClimbState, *, is_own: bool) -> bool:
    """True for a new setting; also for one that brought nothing, if a finding proposes it again on another base."""
    before = [trial for trial in state.trials if trial.settings == new]
    again = is_own and not _is_repeat(new, state) and all(trial.outcome in _AGAIN for trial in before)
    return not before or again


def _another_training(new: Mapping[str, Plain], allow: frozenset[str]) -> str:
    names = [name for name in new if changes_steps(name) and name not in allow]
    if not names:
        return ""
    why = "; ".join(dict.fromkeys(KNOBS[name].changes_training for name in names))
    return ANOTHER_TRAINING.format(why=why, names=",".join(names))


def _refusal(new: Mapping[str, Plain], state: ClimbState) -> str:
    together = {
        n: v for n, v in {**state.base, **new}.items() if n in KNOBS and isinstance(v, bool | int | float | str)
    }
    imagined = with_settings(state.observation, together)
    reasons = [KNOBS[name].refuses(imagined, value) for name, value in together.items() if name in new]
    return "; ".join(reason for reason in reasons if reason)


# -- the next value of a knob ------------------------------------------------------------------------------------------


def _next_values(knob: Knob, state: ClimbState) -> Iterator[Value]:
    """Values not tried yet, in order. Numbers stop below the first value that brought nothing."""
    now = _now(knob.name, state)
    trials = [(t.settings[knob.name], t.outcome) for t in state.trials if knob.name in t.settings]
    lost = [old for old, outcome in trials if outcome != "kept" and _is_number(old)]
    times = step_times(state.facts, state.cores)
    for value in knob.next_values(now if isinstance(now, bool | int | float | str) else None, times):
        is_new = value != now and all(value != old for old, _ in trials)
        if is_new and not (_is_number(value) and any(value > old for old in lost)):
            yield value


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


WORTH_HAVING = 0.1  # of the time: a possible gain this large is measured a second time
KEEPING = ("same", "within the band")


class Judgement(Struct, frozen=True):
    """The outcome of an attempt, and why: a sentence without a full stop."""

    outcome: Outcome
    words: str


def early_judgement(comparison: Comparison, names: Collection[str]) -> Judgement | None:
    """The outcome if a single full run settles it; None: blocks are needed. `names`: the knobs that were set."""
    if comparison.b.failure:
        return Judgement("failed", comparison.b.failure)
    broken = broken_loss(comparison.a.losses, comparison.b.losses)
    if broken:
        return Judgement("loss broken", broken)
    idle = [c for c in comparison.b.checks if c.name in names and c.state == "no effect"]
    if idle and len(idle) == len(names):
        return Judgement("no effect", f"it had no effect: {idle[0].evidence}")
    return None


def judge(
    comparison: Comparison,
    loss: LossComparison | None,
    names: Collection[str],
    allow: Collection[str],
    memory_full: float = DEFAULT.memory_full,
) -> Judgement:
    """The verdict on one attempt. `names`: the knobs that it set; `allow`: knobs that may change the training.

    A faster setting is not kept if it needs at least `memory_full`, a fraction of the device's memory.
    """
    early = early_judgement(comparison, names)
    if early is not None:
        return early
    if comparison.evidence == "sequential" and comparison.verdict != "not comparable":
        return Judgement("unsure", "undecided, the budget left no time for interleaved blocks")
    if comparison.verdict != "faster":
        return _not_faster(comparison)
    share = _memory_share(comparison.b)
    if share >= memory_full:
        words = f"it takes {percent(share)} of the device's memory: the next larger batch would not fit"
        return Judgement("memory", words)
    if loss is None or loss.verdict == "not measurable":
        return _without_loss(names, allow)
    if loss.verdict not in KEEPING:
        words = decapitalized(loss.words).rstrip(".")
        if set(names) & set(allow):
            return Judgement("kept", f"faster; {words}: kept because --allow says so")
        return Judgement("loss moved", f"faster, but {words}; --allow {','.join(names)} keeps it all the same")
    same = (
        "is the same" if loss.verdict == "same" else f"moves no further than with another seed ({loss.seeds + 1} seeds)"
    )
    return Judgement("kept", f"faster, and the loss {same}")


def unsure(comparison: Comparison) -> bool:
    """Whether it is undecided and the measurements scatter too much to exclude a gain worth having."""
    if comparison.verdict != "undecided":
        return False
    return comparison.interval is None or comparison.pairs < TOO_FEW or comparison.interval[0] < 1 - WORTH_HAVING


def broken_loss(a: Sequence[float], b: Sequence[float]) -> str:
    """The step from which B's loss is NaN or infinite while A's loss is finite, in words; empty if there is none.

    The last step of a run may have been cut off before its loss.
    """
    for step, (of_a, of_b) in enumerate(zip(a[:-1], b[:-1], strict=False), start=1):
        if math.isfinite(of_a) and not math.isfinite(of_b):
            kind = "not a number (NaN)" if math.isnan(of_b) else "infinite"
            return f"the loss is {kind} from step {step} on"
    return ""


def _not_faster(comparison: Comparison) -> Judgement:
    if comparison.verdict == "slower":
        return Judgement("slower", "it is slower")
    if comparison.verdict == "not comparable" or comparison.ratio is None:
        why = comparison.notes[0] if comparison.notes else "the two cannot be compared"
        return Judgement("not comparable", why.rstrip("."))
    if comparison.verdict == "no measurable difference":
        return Judgement("no gain", "no measurable difference")
    if comparison.interval is None or comparison.pairs < TOO_FEW:
        return Judgement("unsure", f"undecided, too few pairs of blocks ({comparison.pairs}) to tell")
    fastest = 1 / comparison.interval[0]
    if fastest < 1 + LEAST_EFFECT:
        return Judgement("no gain", f"the speedup is at most {factor(fastest)}×")
    middle, around = speed_within(comparison.ratio, comparison.interval)
    return Judgement("unsure", f"undecided: {middle}× speedup, 95 % interval {around}")


def _memory_share(side: Side) -> float:
    """The peak as a fraction of the device's memory; 0 if unknown."""
    memory = side.facts.run.memory if side.facts is not None else None
    if memory is None or not memory.total_bytes:
        return 0.0
    return (memory.peak_reserved_bytes or memory.peak_allocated_bytes or 0) / memory.total_bytes


def _without_loss(names: Collection[str], allow: Collection[str]) -> Judgement:
    """The outcome if losses cannot be compared: only a setting that cannot change the training is kept."""
    changing = [name for name in names if name not in KNOBS or not KNOBS[name].same_training]
    if not changing:
        return Judgement("kept", "faster; the loss could not be compared, and this changes only how data arrives")
    if set(changing) <= set(allow):
        return Judgement("kept", "faster; the effect on the loss could not be measured: kept because --allow says so")
    words = "faster, but whether the loss stays the same could not be measured"
    return Judgement("loss moved", f"{words}; --allow {','.join(changing)} keeps it all the same")
