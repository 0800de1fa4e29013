"""Which call takes the training thread's time, whoever made the library: read off looks at its stack.

What no list holds is still named: by the user's line, and the function below it. In a run with its trace another
process looks, evenly, and twice as sparingly each time that the looks become many; where none can, a thread of ours.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from gpulab.capture.lines.batch_lines import BatchLines
from gpulab.capture.lines.places import Naming, Stack
from gpulab.capture.lines.samples import Pace, StackWatch, is_ours, users_lines
from gpulab.capture.lines.update_line import UpdateLine
from gpulab.capture.stacks.stack import Spot
from gpulab.run import CALL_KINDS, CallKind, CallLooks, Steps
from gpulab.tape.marks import NEVER
from gpulab.user_code import Owner, owners

OUTSIDE, WITHIN = Pace(0.005, 2_000), Pace(0.02, 3_000)  # so of 1,000 looks at least a share's error is 1.6 points
_NEARLY_ALL = 0.8  # of a function's looks, ours: what it calls is named in its place

_TRAINS = re.compile(
    r"[/\\]torch[/\\](nn|autograd|optim|_dynamo|_functorch|distributed)[/\\]|[/\\]torch[/\\]_tensor\.py"
)
_MODULES = re.compile(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py")  # of what it holds, only calls compute
_TENSORS = re.compile(r"[/\\]torch[/\\]_tensor\.py")  # of their methods, only this one
_LOADS = re.compile(r"[/\\]torch[/\\]utils[/\\]data[/\\]")
_TORCH = re.compile(r"[/\\]torch[/\\]")
_BESIDE = re.compile(  # what trains and computes nothing, though it is PyTorch's or a module
    r"[/\\]torchmetrics[/\\]|"
    r"[/\\]torch[/\\](optim[/\\]lr_scheduler|utils[/\\]tensorboard|serialization|distributed[/\\]checkpoint)"
)
_UPDATES = re.compile(  # file: function
    r"[/\\]torch[/\\](_tensor\.py:Tensor\.backward$|autograd[/\\]\w+\.py:(backward|grad|_engine_run_backward)$|"
    r"optim[/\\](?!lr_scheduler)\w+\.py:.*(\.step|profile_hook_step.*)$)"
)
_CALLBACK = re.compile(r"(^|\.)on_\w+$")  # as trainers call them
_ROOTS = re.compile(r"^.*[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")


class _Call(Struct, frozen=True):
    """`line` of the user's that calls, and what."""

    line: Spot
    callee: str
    kind: CallKind


def call_looks(
    watch: StackWatch, origin_ns: int, steps: Steps, update: UpdateLine, batches: BatchLines, naming: Naming
) -> tuple[CallLooks | None, tuple[str, ...]]:
    """What was seen from the first step to the last, on the run's clock, and the names of what was called."""
    seen = watch.looks
    if seen is None:
        return None, ()
    at_ns, stacks = np.array(seen.t_ns, np.int64) - origin_ns, seen.stacks
    rows = np.flatnonzero((at_ns >= steps.start_ns.min(initial=NEVER)) & (at_ns <= steps.end_ns.max(initial=0)))
    numbers = [seen.stack[i] for i in rows.tolist()]
    if not numbers:
        return None, ()
    loops = {(file, function) for file, _, function in (*update.step_lines, *update.lines)}
    path = training_path(stacks)
    users = [users_lines(stack) for stack in stacks]
    inner = [lines[0] if lines else None for lines in users]
    calls = _chosen([calls_in(stack, loops, path, update, batches) for stack in stacks], inner, numbers)
    of = [calls[i] for i in numbers]
    names = tuple(dict.fromkeys(call.callee for call in of if call is not None))
    within = [inner[i] if call is not None else None for i, call in zip(numbers, of, strict=True)]
    looks = CallLooks(
        t_ns=at_ns[rows],
        place=np.array([-1 if c is None else naming.number(c.line) for c in of], np.int32),
        callee=np.array([-1 if c is None else names.index(c.callee) for c in of], np.int32),
        within=np.array([naming.number(spot) for spot in within], np.int32),
        kind=np.array([0 if c is None else CALL_KINDS.index(c.kind) for c in of], np.uint8),
        exact=watch.is_exact,
    )
    return looks, names


def training_path(stacks: Iterable[Stack]) -> set[tuple[str, str]]:
    """The functions, by file and name, from which a backward pass or an optimizer's step was called."""
    path: set[tuple[str, str]] = set()
    for stack in stacks:
        for i in reversed(range(len(stack))):
            if _UPDATES.search(f"{stack[i][0]}:{stack[i][2]}"):
                path.update((file, function) for file, _, function in stack[i + 1 :])
                break
    return path


def calls_in(
    stack: Stack, loops: set[tuple[str, str]], path: set[tuple[str, str]], update: UpdateLine, batches: BatchLines
) -> tuple[_Call | None, _Call | None]:
    """Of a whole stack: the library's function that the innermost line of the user's has called, and the user's
    function that a line of the loop has. None where the call trains, loads, or is gpulab's.

    `loops`: functions, by file and name, that hold a line from which an update or a loader was asked for. `path` is of
    `training_path`: where a library holds the loop, what leaves that path is a call.
    """
    end = next((i for i, spot in enumerate(stack) if owners[spot[0]] is Owner.RUNNER), len(stack))
    stack = stack[:end]
    users = [i for i, spot in enumerate(stack) if owners[spot[0]] is Owner.USER]
    if not users or is_ours(stack) or any(_LOADS.search(spot[0]) for spot in stack):
        return None, None
    makes_batch = batches.at(tuple(stack[i] for i in users))
    inner = users[0]
    aside = next((i for i in range(inner) if (stack[i][0], stack[i][2]) in path), inner)
    below = stack[:aside][::-1]
    library = None
    of_library = aside < inner or stack[inner] not in update.step_lines
    if of_library and not _is_training(below) and (callee := callee_of(below)):
        library = _Call(stack[inner], callee, "batch" if makes_batch else "library")
    loop = next((i for i in users if (stack[i][0], stack[i][2]) in loops), 0)
    inwards = range(loop - 1, -1, -1)
    kind: CallKind = "batch" if makes_batch else "own"
    own = next((i for i in inwards if not _wraps(stack[i]) and (stack[i][0], stack[i][2]) not in path), None)
    if (callback := next((i for i in inwards if _is_callback(stack, i)), None)) is not None:
        own, kind = callback, "aside"
    elif own is None or owners[stack[own][0]] is not Owner.USER or _is_training(stack[:loop]):
        return library, None
    caller = stack[next(i for i in users if i > own)]
    if not makes_batch and batches.needed and caller not in batches.needed:
        kind = "aside"
    return library, _Call(caller, _written(stack[own][2]), kind)


def _is_callback(stack: Stack, i: int) -> bool:
    """Whether that frame is a function of the user's that a trainer calls beside its steps."""
    return bool(
        owners[stack[i][0]] is Owner.USER and _CALLBACK.search(stack[i][2]) and owners[stack[i + 1][0]] is Owner.LIBRARY
    )


def _is_training(frames: Sequence[Spot]) -> bool:
    return any(_trains(spot) for spot in frames) and not any(_is_beside(spot) for spot in frames)


def _trains(spot: Spot) -> bool:
    file, _, function = spot
    if _TENSORS.search(file):
        return function == "Tensor.backward"
    return bool(_TRAINS.search(file)) and (not _MODULES.search(file) or "_call_impl" in function)


def _is_beside(spot: Spot) -> bool:
    """A scheduler's wrapper of the optimizer's own step is none."""
    return bool(_BESIDE.search(spot[0])) and "<locals>" not in spot[2]


def callee_of(frames: Sequence[Spot]) -> str:
    """The library's function that a user's line has called, from the line inwards, as a user writes it: without what
    wraps it. Empty where there is none, and for PyTorch, whose functions compute.
    """
    named = [(spot, _module(spot[0])) for spot in frames if owners[spot[0]] is Owner.LIBRARY]
    public = [(spot, module) for spot, module in named if module and _is_public(spot[2])]
    for spot, module in public:
        if not _TORCH.search(spot[0]) or _is_beside(spot):
            return _public_name(module, spot[2])
        if not any(_is_beside(s) for s in frames):
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
