"""Which passes over a DataLoader train nothing: evaluation, as far as a loop's own marks tell. Pure: knows times only.

A pass begins when a loader is asked for an iterator and ends when it has none left, or with its last answer where it is
left early. It is evaluation where neither a backward pass nor an optimizer step came between its first request and its
end; left early, also only where its loader never fed the training. What works on the last batch after that answer is
not part of it: `grad_off` knows that, where gradients are switched off meanwhile.
"""

from __future__ import annotations

from msgspec import Struct

from gpulab.capture.stacks.stack import Spot

_LEFT_KEPT = 32  # passes left early that may yet go on


class Pass(Struct, eq=False):
    """One pass; times on the clock of the marks. `spot` is the line that asked first."""

    loader: int
    start_ns: int
    last_ns: int
    spot: Spot | None = None
    batches: int = 0
    trains: bool = False


class Passes:
    """Hears the marks of a loop; methods that return passes say which have turned out to be evaluation."""

    def __init__(self) -> None:
        self._open: dict[int, Pass] = {}  # by loader, the newest answer last
        self._ended: list[Pass] = []  # the newest that ended without training: its batch may be trained on even now
        self._left: list[Pass] = []  # open, and training has gone on since: left early, unless asked again
        self._feeders: set[int] = set()
        self._asking: list[int] = []
        self.steady = False  # training went on with the only pass that is open, and none was begun or ended since

    def asked(self, loader: int, t_ns: int, *, fresh: bool, spot: Spot | None = None) -> tuple[Pass, ...]:
        """A loader is asked for a batch, or for a new iterator."""
        self._asking.append(loader)
        if len(self._asking) > 1:  # a loader within a loader
            return ()
        evaluated: tuple[Pass, ...] = ()
        if self._ended:
            evaluated, self._ended = tuple(self._ended), []
        if fresh:
            self.steady = False
            old = self._open.pop(loader, None)
            if old is not None and not old.trains and old.batches:
                self._left.append(old)
            self._open[loader] = Pass(loader, t_ns, t_ns, spot)
        elif self._left and loader not in self._open:
            self._go_on(loader)
        return evaluated

    def _go_on(self, loader: int) -> None:
        """A pass that seemed to be left is asked again: it feeds the training, together with another."""
        self.steady = False
        old = next((p for p in reversed(self._left) if p.loader == loader), None)
        if old is not None:
            self._left.remove(old)
            old.trains = True
            self._open[loader] = old
            self._feeders.add(loader)

    def answered(self, t_ns: int, *, batch: bool, end: bool) -> None:
        """The loader that was asked last has answered: with a batch, or that it has none left."""
        if not self._asking:
            return
        loader = self._asking.pop()
        newest = self._open.get(loader)
        if self._asking or newest is None:
            return
        newest.last_ns = t_ns
        newest.batches += batch
        if end or len(self._open) > 1:
            self.steady = False
            del self._open[loader]
            if not end:
                self._open[loader] = newest  # as the newest
        if not end:
            return
        if newest.batches and not newest.trains:
            self._ended.append(newest)

    def trained(self) -> tuple[Pass, ...]:
        """Training goes on, with a batch of the loader that is known to feed it, else of the one that answered last."""
        if len(self._open) == 1 and next(iter(self._open.values())).trains:
            self.steady = True  # nearly always
            return ()
        given = [p for p in self._open.values() if p.batches]
        if not given:  # the batch is of a pass that has ended: its end was asked for ahead (Accelerate)
            self._feeders.update(p.loader for p in self._ended)
            self._ended = []
            return ()
        feeder = next((p for p in reversed(given) if p.loader in self._feeders), given[-1])
        feeder.trains = True
        self._feeders.add(feeder.loader)
        for other in given:
            if not other.trains:
                del self._open[other.loader]
                self._left.append(other)
        if len(self._left) <= 2 * _LEFT_KEPT:
            return ()
        settled, self._left = self._left[:-_LEFT_KEPT], self._left[-_LEFT_KEPT:]
        return tuple(p for p in settled if p.loader not in self._feeders)

    def finish(self) -> tuple[Pass, ...]:
        rest = [*self._left, *(p for p in self._open.values() if not p.trains and p.batches)]
        evaluated = (*self._ended, *(p for p in rest if p.loader not in self._feeders))
        self._left, self._open, self._ended = [], {}, []
        return evaluated
