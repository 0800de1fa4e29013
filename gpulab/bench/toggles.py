"""The toggles of a cell: each knob's present value, possible values and expected gain; and plans that measure them.

Pure except for what knobs read from this machine; front ends draw plain data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.api.diagnose import diagnosis_for_report, learned_here
from gpulab.errors import UsageError
from gpulab.formatting import speed_within
from gpulab.knobs.catalogue import KNOBS, knobs_against
from gpulab.knobs.knob import Knob, Value, setting_text
from gpulab.knobs.loader_options import with_settings
from gpulab.knobs.observation import Observation
from gpulab.knobs.variables import Variables
from gpulab.prediction.predict import Predictor
from gpulab.prediction.prediction import Prediction
from gpulab.store.folders import new_id
from gpulab.tuning.bench import Bench, Row
from gpulab.tuning.climb_policy import step_times
from gpulab.tuning.compare.cost import SetupCost, cell_steps, setup_cost
from gpulab.tuning.record import Speed
from gpulab.tuning.schedule import Arm, Plan, arms_in
from gpulab.verdict import Verdict
from gpulab.views.wording import lesson_path

NOTHING_EXPECTED = "No expectations"
MOST = 1_000_000  # limit of a number field; the knob itself checks values
NO_GAIN, CLEAR_GAIN = 1.1, 1.05  # a speedup worth a click: at the interval's best end, and in the middle
_PROPOSED = 2  # values of a knob whose gain is predicted
_UNFOLDABLE = 5  # least number of toggles that stay unfolded, whatever their expectations


class Toggle(Struct, frozen=True):
    """One knob in this cell. `reason`: why it cannot be turned here; empty if it can.

    `rank`: position among the fixes that the diagnosis names, the gravest cause first; infinite: not among them.
    """

    knob: Knob
    current: Value | None
    reason: str = ""
    prediction: Prediction | None = None  # for the most promising value
    rank: float = math.inf
    cost: SetupCost | None = None  # predicted one-time cost
    folded: bool = False

    @property
    def proposal(self) -> str:
        """The most promising value, as text; empty without a prediction."""
        return self.prediction.settings.get(self.knob.name, "") if self.prediction is not None else ""


def toggles_of(
    knobs: Iterable[Knob], observation: Observation | None, figures: Facts | None
) -> tuple[tuple[Toggle, ...], str]:
    """One toggle for each knob, the largest expected gain first; and why there are no expectations, if so.

    Without an observation nothing is known about the cell.
    """
    if observation is None:
        return (), ""
    toggles = []
    for knob in knobs:
        current = knob.value_in(observation)
        toggles.append(Toggle(knob, current, _why_fixed(knob, observation, current)))
    toggles, why = (toggles, "") if figures is None else _predicted(toggles, observation, figures)
    return _ordered(toggles), why


def _why_fixed(knob: Knob, observation: Observation, current: Value | None) -> str:
    """Why the knob can have no other value here; empty if it can."""
    nearby = (1, current + 1) if type(current) is int else ()  # a dataset of 6 items allows batches of 1 to 6
    reasons = [knob.refuses(observation, value) for value in (*knob.options, *nearby) if value != current]
    return (reasons[0] or "") if reasons and all(reasons) else ""


def _predicted(toggles: Sequence[Toggle], observation: Observation, figures: Facts) -> tuple[list[Toggle], str]:
    """The toggles with predictions and ranks; and why there are no expectations, if so."""
    evidence = learned_here(figures)
    findings = diagnosis_for_report(figures, evidence).findings
    proposals = {name: text for f in reversed(findings) for name, text in f.settings}
    ranks = {
        knob.name: place + knob.helps_against.get(f.key, 0) / 10
        for place, f in reversed([*enumerate(findings)])
        for knob in (*knobs_against(f.key), *(KNOBS[name] for name, _ in f.settings if name in KNOBS))
    }
    toggles = [replace(toggle, rank=ranks.get(toggle.knob.name, math.inf)) for toggle in toggles]
    predictor = Predictor(figures, evidence)
    if predictor.refusal:
        return toggles, f"{NOTHING_EXPECTED}: {predictor.refusal}."
    times = step_times(figures, figures.run.environment.usable_cores or 1.0)

    def best(toggle: Toggle) -> Toggle:
        knob, current = toggle.knob, toggle.current

        def others(values: Iterable[Value]) -> list[Value]:
            return [value for value in values if value != current and not knob.refuses(observation, value)]

        if toggle.reason:
            return toggle
        values = others(knob.next_values(current, times))
        if knob.name in proposals:
            values = [knob.parse(proposals[knob.name])]
        values = values or others(knob.options)
        predictions = [predictor.of({knob.name: setting_text(value)}) for value in values[:_PROPOSED]]
        useful = [prediction for prediction in predictions if prediction.ratio is not None]
        most = min(useful, key=lambda prediction: prediction.ratio or 1.0, default=None)
        return replace(toggle, prediction=most, cost=_cost(most, figures) if most is not None else None)

    toggles = [best(toggle) for toggle in toggles]
    if any(_gains(toggle.prediction) for toggle in toggles):
        return toggles, ""
    if any(f.key == "cpu_shared" for f in findings):
        return toggles, f"{NOTHING_EXPECTED}: the machine was contended while this was measured."
    return toggles, "" if any(toggle.prediction for toggle in toggles) else f"{NOTHING_EXPECTED}: only a run tells."


def _cost(prediction: Prediction, figures: Facts) -> SetupCost | None:
    """The expected one-time cost, and after how many steps it pays off."""
    interval, step = prediction.interval, figures.typical_step_us
    said: Verdict = "faster" if interval is not None and interval[1] < 1 else "undecided"
    speed = Speed(said, prediction.ratio, interval, setup_s=prediction.setup_s)
    return setup_cost(speed, step.median if step is not None else None, cell_steps(figures))


def _ordered(toggles: Sequence[Toggle]) -> tuple[Toggle, ...]:
    """Predicted gains first, then fixes of the diagnosis without a prediction, then others; fixed ones last."""

    def place(toggle: Toggle) -> tuple[bool, int, float]:
        predicted, fixed = toggle.prediction, bool(toggle.reason)
        if predicted is not None:
            pays = _gains(predicted) and (toggle.cost is None or toggle.cost.pays)
            return (fixed, 0, predicted.ratio or 1.0) if pays else (fixed, 2, 0.0)
        return (fixed, 1, toggle.rank) if toggle.rank < math.inf else (fixed, 2, 0.0)

    ordered = sorted(toggles, key=place)
    folds = [number >= _UNFOLDABLE and place(toggle)[:2] == (False, 2) for number, toggle in enumerate(ordered)]
    return tuple(replace(toggle, folded=folded) for toggle, folded in zip(ordered, folds, strict=True))


# what a click measures: plans

Kind = Literal["run", "each", "climb", "decide", "again"]
TWO_SETTINGS = "Change two or more toggles: each is measured alone, then all together."
MORE_PAIRS = (5, 10, 30)  # more pairs to decide a row: minimum, default if no estimate is possible, maximum


def valid(settings: object) -> dict[str, Value]:
    """Settings from a front end as values of knobs; invalid ones are dropped."""
    values: dict[str, Value] = {}
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        if name in KNOBS and isinstance(value, (bool, int, float, str)):
            with suppress(UsageError):
                values[name] = KNOBS[name].parse(value)
    return values


def plan_of(
    kind: Kind, settings: Mapping[str, Any], row: Row | None, bench: Bench, variables: Variables
) -> tuple[Plan, tuple[Row, ...]]:
    """The plan for these settings or this row, and the rows that it measures, in the order of its arms.

    Raises UsageError if there are too few settings.
    """
    pairs, arms = None, [Arm(dict(settings))]
    if kind == "each":
        if len(settings) < 2:
            raise UsageError(TWO_SETTINGS)
        arms = [*(Arm({name: value}) for name, value in settings.items()), *arms]
    elif row is not None and kind in ("decide", "again"):
        arms = [arm_of(row.settings, variables)]
        pairs = _more_pairs(row) if kind == "decide" else None
    arms = [arm for arm in arms if arm.settings]
    rows = []
    for arm in arms:
        before = bench.of(arm.texts) or Row(new_id(), arm.texts)
        anew = kind == "again" or before.failure
        rows.append(replace(before, blocks=(), speed=None, failure="") if anew else before)
    return Plan(tuple(arms), pairs=pairs, interleaved=bool(arms), early=bool(arms)), tuple(rows)


def arm_of(settings: Mapping[str, str], variables: Variables) -> Arm:
    """The arm for settings in text form, for a cell with these variables."""
    (arm,) = arms_in(variables, [f"{name}={text}" for name, text in settings.items()])
    return arm


def _more_pairs(row: Row) -> int:
    least, unknown, most = MORE_PAIRS
    if row.speed is None or row.speed.pairs_to_decide is None:
        return unknown
    return min(most, max(least, row.speed.pairs_to_decide - row.speed.pairs))


# data for a front end


def data(
    toggles: Sequence[Toggle],
    observation: Observation | None,
    settings: Mapping[str, Value],
    failures: Mapping[str, str],
) -> list[dict[str, object]]:
    """Each toggle as plain data, judged together with the present choices of the others.

    `failures`: by label of settings that were run, why they could not be compared; such settings get no expectation.
    """
    if observation is None:
        return []
    together = with_settings(observation, settings)
    return [_data(toggle, together, settings.get(toggle.knob.name), failures) for toggle in toggles]


def _data(
    toggle: Toggle, observation: Observation, choice: Value | None, failures: Mapping[str, str]
) -> dict[str, object]:
    knob, current = toggle.knob, toggle.current
    reason, problem, cautions = "", "", tuple[str, ...]()
    if choice is None:
        reason = _why_fixed(knob, observation, current)
    else:
        problem, cautions = knob.refuses(observation, choice) or "", knob.cautions(observation, choice)
    failure, cost = failures.get(f"{knob.name}={toggle.proposal}", ""), toggle.cost
    if cost is not None and not (cost.pays and cost.cell_steps):
        cautions = (*cautions, f"expected {cost.words}")
    return {
        "name": knob.name,
        "title": knob.title,
        "help": knob.help,
        "lesson": lesson_path(knob.lesson) or "",
        **_control(knob, current, choice),
        "current": current,
        "shown": setting_text(current) if current is not None else "unknown",
        "value": choice,
        "reason": reason,
        "folded": toggle.folded and choice is None,
        "problem": problem,
        "cautions": [*cautions, *([f"{toggle.proposal}: {failure}"] if failure else [])],
        "proposal": None if not toggle.proposal else knob.parse(toggle.proposal),
        "proposed": toggle.proposal,
        "expected": "" if failure else expected_words(toggle.prediction),
    }


def _control(knob: Knob, current: Value | None, choice: Value | None) -> dict[str, object]:
    kinds = {type(option) for option in knob.options}
    if kinds == {bool}:
        return {"kind": "switch"}
    if kinds == {int} and current is not None:
        least = min(0, int(current)) if 0 in knob.options else 1
        return {"kind": "number", "least": least, "most": MOST}
    values = list(dict.fromkeys([*knob.options, *(v for v in (current, choice) if v is not None)]))
    return {"kind": "choice", "options": [{"value": v, "words": setting_text(v)} for v in values]}


def _gains(prediction: Prediction | None) -> bool:
    """Whether the expected gain is worth a click."""
    if prediction is None or prediction.ratio is None or prediction.interval is None:
        return False
    low, high = prediction.interval
    return low <= 1 / NO_GAIN and (high <= 1 or prediction.only_sign or prediction.ratio <= 1 / CLEAR_GAIN)


def expected_words(prediction: Prediction | None) -> str:
    """ "expected 2.1× (1.7–2.6)"; a mere range has no middle value; empty without a prediction."""
    if prediction is None or prediction.ratio is None or prediction.interval is None:
        return ""
    if prediction.interval[0] > 1:
        return "slower expected"
    if not _gains(prediction):
        return "no clear gain expected"
    middle, around = speed_within(prediction.ratio, prediction.interval)
    return f"expected {around}×" if prediction.only_sign else f"expected {middle}× ({around})"
