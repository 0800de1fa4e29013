"""One comparison, of two or of many settings, and each way to show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulab.diagnosis.diagnose import Headline
from gpulab.errors import UsageError
from gpulab.tuning.bench import rows_of
from gpulab.tuning.compare.headline import comparison_headline, experiment_headline
from gpulab.tuning.record import Comparison, Experiment, LossComparison, PartChange
from gpulab.verdict import Verdict
from gpulab.views import bench
from gpulab.views.comparison import document, sections, sweep
from gpulab.views.layout import Section
from gpulab.views.view import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, repr=False)
class Compared(View):
    """A comparison with its views.

    `verdict`, `ratio` (the time of B over A), `interval`, `noise_floor`, `parts` and `loss` are those of the one
    comparison there is; of several settings take one of `comparisons`. `price_per_hour` of the machine, in any
    currency, adds the cost of a million samples.
    """

    result: Comparison | Experiment
    price_per_hour: float | None = None

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Every setting against the first."""
        return (self.result,) if isinstance(self.result, Comparison) else self.result.comparisons

    @property
    def only(self) -> Comparison:
        """The one comparison. Raises UsageError where there are several settings, or none."""
        if len(self.comparisons) != 1:
            raise UsageError(
                f"This is a comparison of {len(self.comparisons) + 1} settings: use one of its `comparisons`."
            )
        return self.comparisons[0]

    @property
    def verdict(self) -> Verdict:
        """Of B against A: "faster", "slower", "no measurable difference", "undecided" or "not comparable"."""
        return self.only.verdict

    @property
    def times_as_fast(self) -> float | None:
        """How many times as fast B is as A, per sample (or step): the figure of the headline."""
        return self.only.times_as_fast

    @property
    def ratio(self) -> float | None:
        """Time per sample (or step) of B over A: below 1 is faster."""
        return self.only.ratio

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the ratio."""
        return self.only.interval

    @property
    def noise_floor(self) -> float | None:
        """As a fraction; None: not measured."""
        return self.only.noise_floor

    @property
    def parts(self) -> tuple[PartChange, ...]:
        """The parts of the step on both sides."""
        return self.only.parts

    @property
    def loss(self) -> LossComparison | None:
        """The losses of both."""
        return self.only.loss

    @property
    def headline(self) -> Headline:
        """The sentence, its evidence and its level."""
        shown = self._simple
        return comparison_headline(shown) if isinstance(shown, Comparison) else experiment_headline(shown)

    def plot(self) -> Figure:
        """A matplotlib figure in the style of your rcParams: how many times as fast, with the 95 % intervals."""
        from gpulab.views.plot import plot_comparisons

        return plot_comparisons(self.comparisons)

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        return document.document(self.result, self.price_per_hour)

    def __repr__(self) -> str:
        return f"<Compared: {self.headline.sentence}>"

    @property
    def _simple(self) -> Comparison | Experiment:
        """An experiment with one knob setting is shown as the comparison that it is."""
        return self.comparisons[0] if len(self.comparisons) == 1 else self.result

    def _opening(self) -> str:
        shown = self._simple
        return sections.opening(shown) if isinstance(shown, Comparison) else sweep.opening(shown)

    def _more(self) -> str:
        sides = self.result.sides if isinstance(self.result, Experiment) else ()
        if any(side.facts is not None and side.facts.run.source == "script" for side in sides):
            return "The rest: the same command with --all or --html FILE"
        if isinstance(self.result, Experiment):
            return self._more_in_python("experiments[-1]")
        return "The rest: the same command with --all"

    def _sections(self) -> tuple[Section, ...]:
        shown = self._simple
        if isinstance(shown, Comparison):
            notes = self.result.notes if isinstance(self.result, Experiment) else ()
            return sections.sections(shown, self.price_per_hour, notes)
        return sweep.sections(shown)

    def _picture(self) -> str:
        ran = any(not sections.never_ran(c) for c in self.comparisons)
        return bench.picture(rows_of(self.comparisons)) if ran else ""
