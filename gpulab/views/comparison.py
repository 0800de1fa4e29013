"""Comparisons of settings or of numbers of ranks as text, page and JSON, and their figures while they are measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from gpulab.diagnosis.finding import Level
from gpulab.diagnosis.headline import Headline
from gpulab.errors import UsageError
from gpulab.formatting import duration, percent, picked, plural
from gpulab.tuning.bench import Bench, Row, rows_of
from gpulab.tuning.compare.cost import cell_steps, cost_of, spending
from gpulab.tuning.compare.headline import comparison_headline, experiment_headline
from gpulab.tuning.compare.statistics import ScalingPoint
from gpulab.tuning.record import Block, Comparison, Experiment, LossComparison, PartChange, Side
from gpulab.tuning.schedule import Arm, Listener
from gpulab.verdict import EQUIVALENT, Verdict
from gpulab.views import bench, comparison_sections
from gpulab.views.bars import FactorAxis
from gpulab.views.comparison_sections import keep_faster, unprofiled_us
from gpulab.views.layout import Section, leading, numbers, present
from gpulab.views.page import static
from gpulab.views.progress import Stoppable
from gpulab.views.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, repr=False)
class Compared(View):
    """A comparison with its views.

    `verdict`, `ratio` (time of B over time of A), `interval`, `noise_floor`, `parts` and `loss` belong to the only
    comparison; with several settings, use one of `comparisons`. `price_per_hour` of the machine, in any currency, adds
    the cost of a million samples.
    """

    result: Comparison | Experiment
    price_per_hour: float | None = None

    @property
    def experiment(self) -> Experiment:
        """The result as an experiment: a comparison of two runs is an experiment with a single comparison."""
        result = self.result
        return result if isinstance(result, Experiment) else Experiment((result.a, result.b), (result,), 0.0)

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every setting against the first."""
        return self.experiment.comparisons

    @property
    def only(self) -> Comparison:
        """The only comparison. Raises UsageError if there are several settings, or none."""
        if len(self.comparisons) != 1:
            raise UsageError(
                f"This is a comparison of {len(self.comparisons) + 1} settings: use one of its `comparisons`."
            )
        return self.comparisons[0]

    @property
    def verdict(self) -> Verdict:
        """B against A: "faster", "slower", "no measurable difference", "undecided" or "not comparable"."""
        return self.only.verdict

    @property
    def times_as_fast(self) -> float | None:
        """Speedup of B over A, per sample (or step): the figure of the headline."""
        return self.only.times_as_fast

    @property
    def ratio(self) -> float | None:
        """Time per sample (or step) of B over that of A: below 1 is faster."""
        return self.only.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio."""
        return self.only.interval

    @property
    def noise_floor(self) -> float | None:
        """The noise as a fraction; None: not measured."""
        return self.only.noise_floor

    @property
    def parts(self) -> tuple[PartChange, ...]:
        """The parts of the step on both sides."""
        return self.only.parts

    @property
    def loss(self) -> LossComparison | None:
        """The losses of both sides."""
        return self.only.loss

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        return experiment_headline(self.experiment)

    def plot(self) -> Figure:
        """A matplotlib figure with your rcParams: the speedups with their 95 % intervals."""
        from gpulab.views.plot import plot_comparisons

        return plot_comparisons(self.comparisons)

    def _figures(self) -> dict[str, object]:
        return comparison_document(self.result, self.price_per_hour)

    def __repr__(self) -> str:
        return f"<Compared: {self.headline.sentence}>"

    def _opening(self) -> str:
        return comparison_sections.opening(self.experiment)

    def _more(self) -> str:
        if isinstance(self.result, Comparison):
            return "The rest: the same command with --all"
        if any(side.facts is not None and side.facts.run.source == "script" for side in self.result.sides):
            return "The rest: the same command with --all or --html FILE"
        return self._more_in_python("experiments[-1]")

    def _sections(self) -> tuple[Section, ...]:
        return comparison_sections.sections(self.experiment, self.price_per_hour)

    def _picture(self) -> Markup:
        ran = any(not comparison_sections.never_ran(c) for c in self.comparisons)
        return bench.picture(rows_of(self.comparisons)) if ran else Markup()


SCHEMA = 1


def comparison_document(record: Comparison | Experiment, price_per_hour: float | None = None) -> dict[str, object]:
    """The JSON document with every figure."""
    if isinstance(record, Comparison):
        kind, headline, figures = "comparison", comparison_headline(record), _comparison(record, price_per_hour)
    else:
        kind, headline, figures = "experiment", experiment_headline(record), _experiment(record, price_per_hour)
    return {"schema": SCHEMA, "kind": kind, "headline": headline, **figures}


def _experiment(experiment: Experiment, price_per_hour: float | None) -> dict[str, object]:
    comparisons = [_comparison(c, price_per_hour) for c in experiment.comparisons]
    return {**picked(experiment, "name", "seconds", "stopped", "notes"), "comparisons": comparisons}


def _comparison(comparison: Comparison, price_per_hour: float | None) -> dict[str, object]:
    return {
        **picked(comparison, "verdict", "evidence", "unit", "times_as_fast", "times_as_fast_interval"),
        **picked(comparison, "ratio", "interval", "noise_floor", "pairs"),
        "equivalence": EQUIVALENT,
        "setup_s": comparison.setup_s,
        **_break_even(comparison),
        **picked(comparison, "differences", "notes", "restored"),
        "parts": comparison.parts,
        "parts_left_out": comparison.no_parts_reason or None,
        "loss": _loss(comparison.loss) if comparison.loss else None,
        "a": _side(comparison.a, comparison, price_per_hour),
        "b": _side(comparison.b, comparison, price_per_hour),
    }


def _break_even(comparison: Comparison) -> dict[str, object]:
    cost = cost_of(comparison)
    steps, interval = (cost.steps, cost.interval) if cost is not None else (None, None)
    return {
        "break_even_steps": steps,
        "break_even_interval": interval,
        "cell_steps": cell_steps(comparison.a.facts),
    }


def _loss(loss: LossComparison) -> dict[str, object]:
    return {
        **picked(loss, "verdict", "words", "seeds"),
        "a": _curve(loss.a),
        "b": _curve(loss.b),
        "band": loss.band,
    }


def _curve(losses: Sequence[float]) -> list[float | str | None]:
    """NaN becomes null; an infinite loss becomes a text, because JSON has no number for it."""
    return [None if math.isnan(x) else x if math.isfinite(x) else ("inf" if x > 0 else "-inf") for x in losses]


def _prediction(side: Side) -> dict[str, object] | None:
    prediction = side.prediction
    if prediction is None:
        return None
    texts = {name: text or None for name, text in picked(prediction, "memory_basis", "basis", "refused").items()}
    return {**picked(prediction, "ratio", "interval", "memory_ratio", "setup_s", "only_sign"), **texts}


def _side(side: Side, comparison: Comparison, price_per_hour: float | None) -> dict[str, object]:
    run = side.facts.run if side.facts is not None else None
    traced = side.facts.traced_step_us if side.facts is not None else None
    return {
        "label": side.label,
        "settings": dict(side.settings),
        "run": run.id if run is not None else None,
        **picked(side, "us_per_step", "us_per_sample"),
        "unprofiled_us_per_step": unprofiled_us(side, comparison),
        "profiled_us_per_step": traced.median if traced is not None else None,
        "memory": run.memory if run is not None else None,
        "per_million_samples": spending(side, price_per_hour),
        "checks": side.checks,
        "failure": side.failure or None,
        "prediction": _prediction(side),
        "edit": side.edit if side is comparison.b and keep_faster(comparison) else None,
        "edit_is_diff": side.edit_is_diff,
        "blocks": [
            {
                **picked(block, "turn", "order", "step_count", "dropped", "sample_count"),
                "time_us": block.time_ns / 1e3,
            }
            for block in side.blocks
        ],
    }


GOOD = 0.8  # our choice: below it, a fifth of each further rank is lost


@dataclass(frozen=True, slots=True, repr=False)
class ScalingView(View):
    """The throughput of a cell by its number of ranks; each number ran once in each of `rounds` rounds."""

    points: tuple[ScalingPoint, ...]
    rounds: int
    cores: int
    stopped: bool = False

    @property
    def headline(self) -> Headline:
        """The speedup of the most ranks."""
        if len(self.points) < 2:
            return Headline("scaling", "Fewer than two rank counts ran.", "There is nothing to compare.", "unknown")
        first, last = self.points[0], self.points[-1]
        level = _level(last)
        begin = "Undecided: so far " if level == "unknown" else ""
        sentence = (
            f"{begin}{plural(last.ranks, 'rank')} give a {last.speedup:.3g}× speedup over {first.ranks}: "
            f"{percent(last.efficiency)} scaling efficiency{_interval(last)}."
        )
        steps = (
            f"{duration(first.step_us)} with {plural(first.ranks, 'rank')}, {duration(last.step_us)} with {last.ranks}"
        )
        evidence = f"A step takes {steps}; each rank has the same batch. Median of {plural(self.rounds, 'round')}."
        return Headline("scaling", sentence, evidence, level)

    def _figures(self) -> dict[str, object]:
        return {"schema": 1, "source": "scaling", "rounds": self.rounds, "stopped": self.stopped, "points": self.points}

    def __repr__(self) -> str:
        return f"<ScalingView: {self.headline.sentence}>"

    def _opening(self) -> str:
        return f"the cell in {', '.join(str(point.ranks) for point in self.points)} ranks"

    def _sections(self) -> tuple[Section, ...]:
        cells = [
            (str(p.ranks), duration(p.step_us), f"{p.speedup:.3g}", percent(p.efficiency), _interval(p).strip(" ()"))
            for p in self.points
        ]
        lines = ["Efficiency: throughput per rank, relative to the fewest ranks."]
        most = self.points[-1].ranks if self.points else 0
        if most > self.cores:
            lines.append(f"{plural(most, 'rank')} share {plural(self.cores, 'CPU core')} here.")
        if self.stopped:
            lines.append("Stopped: these rounds had finished.")
        columns = numbers("ranks", "step time", "speedup", "efficiency", "95 % interval")
        return present(leading(Section.table("Scaling", columns, cells, lines, wide=True)))


def _level(point: ScalingPoint) -> Level:
    """Good or bad only if the whole interval is on that side."""
    if point.interval is None or point.interval[0] < GOOD <= point.interval[1]:
        return "unknown"
    return "good" if point.interval[0] >= GOOD else "bad"


def _interval(point: ScalingPoint) -> str:
    if point.interval is None:
        return ""
    return f" (95 % interval {percent(point.interval[0])} to {percent(point.interval[1])})"


class Comparing(Stoppable):
    """Shows the baseline and these arms while they run; `blocks` returns the measurements so far."""

    def __init__(
        self,
        stop: Callable[[], None],
        hint: str,
        arms: Sequence[Arm],
        blocks: Callable[[], Sequence[Block]],
        *,
        also: Listener | None = None,
        show: bool = True,
    ) -> None:
        super().__init__(stop, hint, also=also, show=show)
        self._rows = [Row(str(number), arm.texts) for number, arm in enumerate(arms, 1)]
        self._blocks = blocks
        self._axis: FactorAxis | None = None

    def _so_far(self) -> tuple[Row, ...]:
        return bench.ordered(Bench("", (Row("0"),)).so_far(self._rows, self._blocks(), 0))

    def _figures(self) -> str:
        return bench.figures(self._so_far())

    def _picture(self) -> Markup:
        rows = self._so_far()
        if not bench.figures(rows):
            return Markup()
        self._axis = bench.axis_so_far(rows, self._axis)
        return Markup("<style>{}</style>{}").format(static("rows.css"), bench.picture(rows, self._axis))
