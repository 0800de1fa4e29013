"""What a lesson's experiments measured, by their names: how much faster, and which value is enough.

By name, so that a guess or an answer written later is still held against the experiment it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.api.experiment import experiments
from gpulab.formatting import factor, percent
from gpulab.knobs.catalogue import KNOBS
from gpulab.lessons.check import Checked, is_unanswered, right, unanswered, wrong
from gpulab.tuning.record import Experiment
from gpulab.views.comparison.sweep import us

AS_GOOD = 0.15  # a time longer by no more than this fraction is as good as the shortest


def experiment_named(name: str) -> Experiment | None:
    """The latest of that name; None where none ran in this process."""
    results = (one.result for one in reversed(experiments))
    return next((e for e in results if isinstance(e, Experiment) and e.name == name), None)


@dataclass(frozen=True, slots=True)
class Faster:
    """How many times as fast a setting is as the cell as written; `sure`: whether that is more than chance gives."""

    times: float
    sure: bool


def times_faster(name: str) -> Faster | None:
    """Of the first setting of the experiment of that name; None where that is not known."""
    experiment = experiment_named(name)
    first = experiment.comparisons[0] if experiment is not None and experiment.comparisons else None
    if first is None or first.ratio is None:
        return None
    return Faster(1 / first.ratio, first.verdict in ("faster", "slower"))


@dataclass(frozen=True, slots=True)
class Swept:
    """The time of a sample (of a step, where all batches are alike) by value, as the table of the sweep shows it."""

    times_us: dict[int, float]

    @classmethod
    def of(cls, experiment: Experiment, knob: str, as_written: int) -> Swept:
        """Of a sweep of one knob over whole numbers; the cell has `as_written`. What failed is left out."""
        times: dict[int, float] = {}
        for side in experiment.sides:
            value = side.settings.get(knob, str(as_written) if side is experiment.sides[0] else None)
            time_us = us(side, experiment)
            if value is not None and time_us and not side.failure:
                times[int(value)] = time_us
        return cls(dict(sorted(times.items())))

    @property
    def best(self) -> int:
        """The value with the shortest time."""
        return min(self.times_us, key=lambda value: self.times_us[value])

    @property
    def enough(self) -> int:
        """The smallest that is as good as the fastest."""
        limit = (1 + AS_GOOD) * self.times_us[self.best]
        return min(value for value, time in self.times_us.items() if time <= limit)


def check_enough(answer: object, name: str, knob: str, as_written: int) -> Checked:
    """Whether `answer` is the smallest value of the sweep of that name that is as good as its best."""
    experiment = experiment_named(name)
    swept = Swept.of(experiment, knob, as_written) if experiment is not None else Swept({})
    if len(swept.times_us) < 2:
        return unanswered(f"There is no sweep {name!r} of {knob} to judge it by: run that cell first.")
    cost = KNOBS[knob].cost
    tried = ", ".join(map(str, swept.times_us))
    if is_unanswered(answer):
        return unanswered(
            f"Put one of the values tried ({tried}) in place of the dots, then run that cell and this one again."
        )
    if isinstance(answer, bool) or not isinstance(answer, int) or answer not in swept.times_us:
        return wrong(f"{answer!r} is not among the values tried: {tried}.")
    longer = swept.times_us[answer] / swept.times_us[swept.best]
    if answer < swept.enough:
        return wrong(
            f"With {knob}={answer} it takes {factor(longer)} times as long as with {knob}={swept.best}. Go further."
        )
    if answer > swept.enough:
        return wrong(
            f"{knob}={swept.enough} is smaller and takes at most {percent(AS_GOOD)} longer than the fastest. {cost}"
        )
    return right(f"{knob}={answer} is the smallest value within {percent(AS_GOOD)} of the fastest. {cost}")
