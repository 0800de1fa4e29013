"""Has those who make the batches looked at: the training thread within a fetch, or the workers of one iterator.

Imported by workers that are started, not forked.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import Channel, Looks, StackWatcher

HERE = -1  # in place of a worker's number
PERIOD_S = 0.003
_FILE = "fetch_clock.py"
_FETCH = (_FILE, "time_fetcher.<locals>.fetch")
_COLLATE = (_FILE, "time_fetcher.<locals>.collate")


class LoadingWatch:
    """Of one iterator, or of all without workers; `name` tells them apart."""

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name

    def watch(self, worker: int) -> None:
        """Have the calling thread looked at while it makes batches."""
        self._channel.watch(self._key(worker), PERIOD_S, _FETCH, spares=True)

    def seen(self, watcher: StackWatcher | None, workers: Iterable[int]) -> list[Looks]:
        """What was seen of each; they are looked at no more."""
        if watcher is None:
            return []
        for worker in workers:
            self._channel.rest(self._key(worker))
        answers = [watcher.looks(self._key(worker)) for worker in workers]
        return [looks for looks in answers if looks is not None]

    def _key(self, worker: int) -> str:
        return f"{self._name}, worker {worker}"


def is_collating(stack: Iterable[Spot]) -> bool:
    """Whether a stack within a fetch is within `collate_fn`."""
    file, function = _COLLATE
    return any(at[2] == function and at[0].endswith(file) for at in stack)
