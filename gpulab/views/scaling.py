"""How a training scales with its ranks, to display."""

from __future__ import annotations

from dataclasses import dataclass

from gpulab.diagnosis.diagnose import Headline
from gpulab.diagnosis.finding import Level
from gpulab.formatting import duration, percent, plain_values, plural
from gpulab.tuning.compare.statistics import ScalingPoint
from gpulab.views.layout import Section, leading, numbers, present
from gpulab.views.view import View

GOOD = 0.8  # ours: below it a fifth of each further rank is lost


@dataclass(frozen=True, slots=True, repr=False)
class ScalingView(View):
    """The throughput of a cell by the number of its ranks, each number run once in each of so many `rounds`."""

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
        said = (
            f"{begin}{plural(last.ranks, 'rank')} give a {last.speedup:.3g}× speedup over {first.ranks}: "
            f"{percent(last.efficiency)} scaling efficiency{_interval(last)}."
        )
        steps = (
            f"{duration(first.step_us)} with {plural(first.ranks, 'rank')}, {duration(last.step_us)} with {last.ranks}"
        )
        evidence = f"A step takes {steps}; each rank has the same batch. Median of {plural(self.rounds, 'round')}."
        return Headline("scaling", said, evidence, level)

    def json(self) -> dict[str, object]:
        """The figures as plain data for `json.dumps`; None is "not measurable"."""
        points = [plain_values(point) for point in self.points]
        return {"schema": 1, "source": "scaling", "rounds": self.rounds, "stopped": self.stopped, "points": points}

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
    """Good or bad only where the whole interval is on that side."""
    if point.interval is None or point.interval[0] < GOOD <= point.interval[1]:
        return "unknown"
    return "good" if point.interval[0] >= GOOD else "bad"


def _interval(point: ScalingPoint) -> str:
    if point.interval is None:
        return ""
    return f" (95 % interval {percent(point.interval[0])} to {percent(point.interval[1])})"
