"""Which call takes the training thread's time, whoever made the library: its stack is looked at during the whole run.

What no list holds is still named: by the user's line, and the function below it. Another process looks, evenly, and
twice as sparingly each time that the looks become many; where none can, a thread of ours looks within.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from time import perf_counter_ns

import numpy as np
from msgspec import Struct

from gpulab.capture.pauses.batch_lines import BatchLines
from gpulab.capture.pauses.line_watch import is_ours, users_lines
from gpulab.capture.pauses.source_lines import Naming, Stack
from gpulab.capture.pauses.stack_sampler import LineSampler
from gpulab.capture.pauses.update_line import UpdateLine
from gpulab.capture.stacks.stack import Spot
from gpulab.capture.stacks.watcher import StackWatcher
from gpulab.run import CALL_KINDS, CallKind, CallLooks, Steps
from gpulab.tape.marks import NEVER
from gpulab.user_code import Owner, owners

PERIOD_S, MOST = 0.005, 2_000  # so of 1,000 looks at least a share's standard error is 1.6 points at most
WITHIN_PERIOD_S, MOST_WITHIN = 0.02, 3_000
_NEARLY_ALL = 0.8  # of a function's looks, ours: what it calls is named in its place

_TRAINS = re.compile(
    r"[/\\]torch[/\\](nn|autograd|optim|_dynamo|_functorch|distributed)[/\\]|[/\\]torch[/\\]_tensor\.py"
)
_MODULES = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py")  # of what it holds, only calls compute
_LOADS = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]")
_TORCH = re.compile(r"[/\\]torch[/\\]")
_METRICS = re.compile(r"[/\\]torchmetrics[/\\]")  # modules that train nothing
_ROOTS = re.compile(r"^.*[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")


class _Call(Struct, frozen=True):
    """`line` of the user's that calls, and what."""

    line: Spot
    callee: str
    kind: CallKind


class CallWatch:
    """The looks of one run at the thread that calls `start`."""

    def __init__(self, watcher: StackWatcher) -> None:
        self._watcher, self._key = watcher, f"calls {perf_counter_ns()}"
        self._within: LineSampler | None = None

    def start(self) -> None:
        """Begin to look."""
        channel = self._watcher.channel
        if channel is None or not channel.watch(self._key, PERIOD_S, most=MOST):
            self._within = LineSampler(period_s=WITHIN_PERIOD_S, most=MOST_WITHIN, whole=True)
            self._within.start()

    def stop(self) -> None:
        """Look no more."""
        if self._within is not None:
            self._within.stop()
        elif self._watcher.channel is not None:
            self._watcher.channel.rest(self._key)

    def looks(
        self, origin_ns: int, steps: Steps, update: UpdateLine, batches: BatchLines, naming: Naming
    ) -> tuple[CallLooks | None, tuple[str, ...]]:
        """What was seen from the first step to the last, on the run's clock, and the names of what was called.

        Before the watcher stops.
        """
        if self._within is not None:
            t_ns, stacks = self._within.seen.t_ns, self._within.seen.stacks
            numbers = list(range(min(len(t_ns), len(stacks))))
        else:
            seen = self._watcher.looks(self._key)
            if seen is None:
                return None, ()
            t_ns, stacks, numbers = list(seen.t_ns), list(seen.stacks), list(seen.stack)
        at_ns = np.array(t_ns[: len(numbers)], np.int64) - origin_ns
        rows = np.flatnonzero((at_ns >= steps.start_ns.min(initial=NEVER)) & (at_ns <= steps.end_ns.max(initial=0)))
        at_ns, numbers = at_ns[rows], [numbers[i] for i in rows.tolist()]
        if not numbers:
            return None, ()
        loops = {(file, function) for file, _, function in (*update.step_lines, *update.lines)}
        users = [users_lines(stack) for stack in stacks]
        inner = [lines[0] if lines else None for lines in users]
        calls = _chosen([calls_in(stack, loops, update, batches) for stack in stacks], inner, numbers)
        names = tuple(dict.fromkeys(call.callee for call in calls if call is not None))
        number = {name: i for i, name in enumerate(names)}
        of = [calls[i] for i in numbers]
        looks = CallLooks(
            t_ns=at_ns,
            place=np.array([-1 if c is None else naming.number(c.line) for c in of], np.int32),
            callee=np.array([-1 if c is None else number[c.callee] for c in of], np.int32),
            within=np.array(
                [naming.number(users[i][0]) if users[i] and c else -1 for i, c in zip(numbers, of, strict=True)],
                np.int32,
            ),
            kind=np.array([0 if c is None else CALL_KINDS.index(c.kind) for c in of], np.uint8),
            exact=self._within is None,
        )
        return looks, names


def calls_in(
    stack: Stack, loops: set[tuple[str, str]], update: UpdateLine, batches: BatchLines
) -> tuple[_Call | None, _Call | None]:
    """Of a whole stack: the library's function that the innermost line of the user's has called, and the user's
    function that a line of the loop has. None where the call trains, loads, or is gpulab's.

    `loops`: functions, by file and name, that hold a line from which an update or a loader was asked for.
    """
    end = next((i for i, spot in enumerate(stack) if owners[spot[0]] is Owner.RUNNER), len(stack))
    stack = stack[:end]
    users = [i for i, spot in enumerate(stack) if owners[spot[0]] is Owner.USER]
    if not users or is_ours(stack) or any(_LOADS.search(spot[0]) for spot in stack):
        return None, None
    makes_batch = batches.at(tuple(stack[i] for i in users))
    inner = users[0]
    below = stack[:inner][::-1]
    library = None
    if not _is_training(below) and stack[inner] not in update.step_lines and (callee := callee_of(below)):
        library = _Call(stack[inner], callee, "batch" if makes_batch else "library")
    loop = next((i for i in users if (stack[i][0], stack[i][2]) in loops), 0)
    own = next((i for i in range(loop - 1, -1, -1) if not _wraps(stack[i])), None)
    if own is None or owners[stack[own][0]] is not Owner.USER or _is_training(stack[:loop]):
        return library, None
    aside = bool(batches.needed) and stack[loop] not in batches.needed
    kind: CallKind = "batch" if makes_batch else "aside" if aside else "own"
    return library, _Call(stack[loop], _written(stack[own][2]), kind)


def _is_training(frames: Sequence[Spot]) -> bool:
    return any(_trains(*spot) for spot in frames) and not any(_METRICS.search(spot[0]) for spot in frames)


def _trains(file: str, _: int, function: str) -> bool:
    return bool(_TRAINS.search(file)) and (not _MODULES.search(file) or "_call_impl" in function)


def callee_of(frames: Sequence[Spot]) -> str:
    """The library's function that a user's line has called, from the line inwards, as a user writes it: without what
    wraps it. Empty where there is none, and for PyTorch, whose functions compute.
    """
    named = [(spot, _module(spot[0])) for spot in frames if owners[spot[0]] is Owner.LIBRARY]
    public = [(spot, module) for spot, module in named if module and _is_public(spot[2])]
    for spot, module in public:
        if not _TORCH.search(spot[0]):
            return _public_name(module, spot[2])
        if not any(_METRICS.search(s[0]) for s in frames):
            return ""
    return ""


def _wraps(spot: Spot) -> bool:
    """A library's decorator, as `torch.no_grad`."""
    return owners[spot[0]] is Owner.LIBRARY and "<locals>" in spot[2]


def _is_public(function: str) -> bool:
    return "<" not in function and not any(re.match(r"_(?!_)", part) for part in function.split("."))


def _module(file: str) -> str:
    """The dotted name of a library's module, from its file."""
    path = _ROOTS.sub("", file)
    while (shorter := _ROOTS.sub("", path)) != path:
        path = shorter
    if path == file:
        return ""
    path = path.removeprefix(f"site-packages{os.sep}").removesuffix(".py")
    return path.replace(os.sep, ".").removesuffix(".__init__")


def _public_name(module: str, function: str) -> str:
    """From the first package, from the outermost inwards, that holds it: `sklearn.metrics.roc_auc_score`."""
    top, parts = function.partition(".")[0], module.split(".")
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        if top in vars(sys.modules[package]) if package in sys.modules else False:
            return _written(f"{package}.{function}")
    return _written(f"{'.'.join(part for part in parts if not part.startswith('_'))}.{function}")


def _written(function: str) -> str:
    return function.replace("<locals>.", "").removesuffix(".__call__").removesuffix(".__init__")


def _chosen(
    pairs: Sequence[tuple[_Call | None, _Call | None]], inner: Sequence[Spot | None], numbers: Sequence[int]
) -> Sequence[_Call | None]:
    """One call for each stack: the user's function, unless nearly all of its looks are in one call of a library's.

    Of the calls of one line the one that takes longest names all. `inner`: each innermost line of the user's.
    """
    counts: Counter[_Call] = Counter()
    inside: Mapping[_Call, Counter[Spot]] = defaultdict(Counter)
    for i in numbers:
        library, own = pairs[i]
        counts.update(call for call in {library, own} if call is not None)
        if own is not None and (line := inner[i]) is not None:
            inside[own][line] += 1
    ours = sorted({library for library, _ in pairs if library is not None}, key=lambda call: counts[call])
    by_line = {call.line: call for call in ours}
    chosen: list[_Call | None] = []
    for (library, own), innermost in zip(pairs, inner, strict=True):
        line = None if library is None else library.line
        if own is not None:
            line, most = max(inside[own].items(), key=lambda item: item[1], default=(None, 0))
            if line not in by_line or most < _NEARLY_ALL * counts[own]:
                chosen.append(own)
                continue
            line = line if line == innermost else None
        chosen.append(None if line is None else by_line[line])
    return chosen
