"""The lines at which the training thread is seen while the profiler runs, looked at by another process.

A thread of ours would see it only where it gives Python's interpreter lock away: at the call of PyTorch after a loop,
never in the loop. So where no other process can look, lines are told of long calls alone (`StackSamples.exact`).
"""

from __future__ import annotations

from time import perf_counter_ns

from gpulab.capture.pauses.batch_lines import BatchLines
from gpulab.capture.pauses.source_lines import Stack
from gpulab.capture.pauses.stack_sampler import LineSampler, Seen
from gpulab.capture.pauses.update_line import UpdateLine
from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import Looks, StackWatcher
from gpulab.user_code import Owner, library_of, owners

THROUGHOUT = 0.99  # of the looks: a line that is on the stack at nearly all of them holds the loop within it


class WatchedLines:
    """As `LineSampler`, from another process where that is possible."""

    def __init__(self, watcher: StackWatcher | None, update: UpdateLine, batches: BatchLines) -> None:
        self._watcher = watcher
        self._update, self._batches = update, batches
        self._instead: LineSampler | None = None
        self._key = f"training {perf_counter_ns()}"
        self._seen: Seen | None = None

    def start(self) -> None:
        """Begin to look at the calling thread."""
        channel = self._watcher.channel if self._watcher is not None else None
        if channel is not None and channel.watch(self._key):
            assert self._watcher is not None
            self._watcher.wait_until_ready()
            return
        self._instead = LineSampler(self._update, self._batches)
        self._instead.start()

    def stop(self) -> None:
        """Look no more."""
        if self._instead is not None:
            self._instead.stop()
        elif self._watcher is not None and self._watcher.channel is not None:
            self._watcher.channel.rest(self._key)

    @property
    def seen(self) -> Seen:
        """What was seen, once looking has stopped and before the watcher has."""
        if self._instead is not None:
            return self._instead.seen
        if self._seen is None:
            looks = self._watcher.looks(self._key) if self._watcher is not None else None
            self._seen = _seen(looks, self._update, self._batches) if looks is not None else Seen([], [])
        return self._seen


def _seen(looks: Looks, update: UpdateLine, batches: BatchLines) -> Seen:
    users = [users_lines(stack) for stack in looks.stacks]
    libraries = [called_library(stack) for stack in looks.stacks]
    after = [update.passed(stack) for stack in users]
    preparing = [batches.at(stack) for stack in users]
    return Seen(
        t_ns=list(looks.t_ns),
        spots=[users[i][0] if users[i] else None for i in looks.stack],
        after=[after[i] for i in looks.stack],
        preparing=[preparing[i] for i in looks.stack],
        callers={spot for stack in users for spot in stack[1:]},
        began_ns=looks.began_ns,
        exact=True,
        libraries=[libraries[i] for i in looks.stack],
        throughout=throughout([users[i] for i in looks.stack], {*update.lines, *update.step_lines}),
    )


def users_lines(stack: tuple[Spot, ...]) -> Stack:
    """The user's own lines of a whole stack; what is outside of what runs the user's code is not profiled."""
    lines: list[Spot] = []
    if is_ours(stack):
        return ()
    for spot in stack:
        owner = owners[spot[0]]
        if owner is Owner.USER:
            lines.append(spot)
        elif owner is Owner.RUNNER:
            break
    return tuple(lines)


def is_ours(stack: tuple[Spot, ...]) -> bool:
    """Whether gpulab itself is at work there."""
    return bool(stack) and owners[stack[0][0]] is Owner.GPULAB


def called_library(stack: tuple[Spot, ...]) -> str:
    """The library that the innermost line of the user's has called; empty for none, and for what has no Python."""
    within: list[str] = []
    for file, _, _ in stack:
        owner = owners[file]
        if owner is Owner.USER:
            break
        if owner is Owner.LIBRARY:
            within.append(file)
    return library_of(within[-1]) if within else ""


def throughout(stacks: list[Stack], around_steps: set[Spot]) -> set[Spot]:
    """The lines that nearly all looks have met and that hold the steps within them.

    `around_steps`: lines that an update or a loader was called from; empty: no such call is known. A line that calls
    neither is hot where nearly all looks meet it, and holds no step.
    """
    counts: dict[Spot, int] = {}
    for stack in stacks:
        for spot in set(stack):
            counts[spot] = counts.get(spot, 0) + 1
    nearly_all = {spot for spot, count in counts.items() if count >= THROUGHOUT * len(stacks)}
    return nearly_all & around_steps if around_steps else nearly_all
