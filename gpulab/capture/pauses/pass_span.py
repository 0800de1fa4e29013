"""From `model.eval()` to `model.train()`: how far an evaluation reaches beyond the code that needs no gradients.

Pure but for the clock: knows times and lines only. An evaluation begins where its function has switched the model
over, and lasts until that function switches it back. What the loop itself switches back later is no end: it does other
things meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from time import perf_counter_ns

from msgspec import Struct
from msgspec.structs import replace

from gpulab.capture.pauses.no_grad import Stretch
from gpulab.capture.pauses.source_lines import Stack
from gpulab.capture.stacks.stack import Spot

_MOST = 10_000
_END = 1 << 62


class _Span(Struct, frozen=True):
    """In evaluation mode, without training. `function`: file and name; None where training has ended it."""

    start_ns: int
    end_ns: int
    function: tuple[str, str] | None


class EvalMode:
    """Hears where a model is switched over and back, and where training goes on."""

    def __init__(self) -> None:
        self.began: tuple[int, tuple[str, str] | None] | None = None
        self._spans: list[_Span] = []

    def switched(self, start_ns: int, end_ns: int, spot: Spot | None, *, trains: bool) -> None:
        """`model.train()` or `model.eval()`, asked for at this line."""
        function = None if spot is None else (spot[0], spot[2])
        if not trains:
            self.began = self.began or (start_ns, function)
        elif self.began is not None:
            began_ns, began_in = self.began
            self.began = None
            self._keep(_Span(began_ns, end_ns, function if function == began_in else None))

    def trained(self, t_ns: int | None = None) -> None:
        """A backward pass or an optimizer's step: what was evaluated was so before. None: the time is now."""
        if self.began is not None:
            start_ns, _ = self.began
            self.began = None
            self._keep(_Span(start_ns, perf_counter_ns() if t_ns is None else t_ns, None))

    def widened(self, evaluations: Sequence[Stretch], loop: Stack) -> tuple[Stretch, ...]:
        """The same evaluations from where they began; to where they ended, in a function that is none of the loop's."""
        self.trained(_END)
        training = {(file, function) for file, _, function in loop}
        starts = [span.start_ns for span in self._spans]
        wider: dict[int, Stretch] = {}
        rest: list[Stretch] = []
        after_ns = 0
        for s in sorted(evaluations, key=lambda s: s.start_ns):
            row = bisect_right(starts, s.start_ns) - 1
            span = self._spans[row] if row >= 0 else None
            if span is None or span.start_ns < after_ns or span.end_ns < s.end_ns:
                rest.append(s)
            elif training and span.function is not None and span.function not in training:
                wider.setdefault(row, replace(s, start_ns=span.start_ns, end_ns=span.end_ns))
            else:
                rest.append(replace(s, start_ns=span.start_ns))
                after_ns = s.end_ns
        return tuple(sorted([*wider.values(), *rest], key=lambda s: s.start_ns))

    def _keep(self, span: _Span) -> None:
        if len(self._spans) < _MOST:
            self._spans.append(span)
