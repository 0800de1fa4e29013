"""A comparison while it goes on: below the line that says what runs, the bench's rows as far as the blocks tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpulab.tuning.bench import Bench, Row
from gpulab.tuning.plan import Arm, Listener
from gpulab.tuning.record import Block
from gpulab.views import bench
from gpulab.views.html_bars import static
from gpulab.views.interval_places import FactorAxis
from gpulab.views.running.progress import Stoppable


class Comparing(Stoppable):
    """As `Stoppable`, of the baseline and these arms, whose blocks so far are asked for when something is drawn."""

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
        self._rows = [Row(str(number), arm.shown) for number, arm in enumerate(arms, 1)]
        self._blocks = blocks
        self._axis: FactorAxis | None = None

    def _so_far(self) -> tuple[Row, ...]:
        return bench.ordered(Bench("", (Row("0"),)).so_far(self._rows, self._blocks(), 0))

    def _figures(self) -> str:
        return bench.figures(self._so_far())

    def _picture(self) -> str:
        rows = self._so_far()
        if not bench.figures(rows):
            return ""
        self._axis = bench.axis_so_far(rows, self._axis)
        return f"<style>{static('rows.css')}</style>{bench.picture(rows, self._axis)}"
