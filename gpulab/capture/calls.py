"""Finds which call takes the training thread's time, from samples of its stack.

Calls into any library are named, without a list of libraries: by the user's line and the function that it calls. In a
run with a trace the sampling process takes evenly spaced samples, and halves their rate whenever they become many;
otherwise a thread samples.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import zip_longest

import numpy as np
from msgspec import Struct

from gpulab.capture.fetch_clock import is_collating
from gpulab.capture.loop_lines import LoopLines
from gpulab.capture.places import Naming
from gpulab.capture.stack_reader import Spot, Stack
from gpulab.capture.stack_sampler import Pace, StackSampler, ThreadSamples
from gpulab.intervals import Intervals, covers
from gpulab.run import CALL_KINDS, CallKind, CallLooks, LoadingLooks, OwnBatches, Phase, StackSamples, Steps
from gpulab.tape.marks import NEVER
from gpulab.user_code import Owner, owners

OUTSIDE, WITHIN = Pace(0.003, 2_000), Pace(0.02, 3_000)  # with 1,000 samples a share's error is 1.6 points
EXCERPTS = 3  # lines whose surroundings are recorded, for the loop and for loading each
_NEARLY_ALL = 0.8  # ours, of a function's samples: a callee that has so many is named instead
_COMPUTES = 0.2  # ours: a function with this share of its samples in modules is part of training


def _search(pattern: str) -> Callable[[str], re.Match[str] | None]:
    """`re.search` with a cache: the same few files and functions come thousands of times."""
    return lru_cache(4_096)(re.compile(pattern).search)


_TRAINS = _search(r"[/\\]torch[/\\](nn|autograd|optim|_dynamo|_functorch|distributed)[/\\]|[/\\]torch[/\\]_tensor\.py")
_EXCHANGES = _search(  # between ranks, which have a rule of their own
    r"[/\\]torch[/\\]distributed[/\\](distributed_c10d|c10d_logger|_functional_collectives)\.py"
)
_RUNS = _search(r"[/\\]torch[/\\]nn[/\\](modules[/\\]|functional\.py)")  # trains only with gradients
_MODULES = _search(r"[/\\]torch[/\\]nn[/\\]modules[/\\]module\.py")  # of its functions only `_call_impl` computes
_TENSORS = _search(r"[/\\]torch[/\\]_tensor\.py")  # of its methods only `backward` trains
_LOADS = _search(r"[/\\]torch[/\\]utils[/\\]data[/\\]")
_TORCH = re.compile(r"[/\\]torch[/\\]")
_BESIDE = _search(  # neither trains nor computes, although it is part of PyTorch or a module
    r"[/\\]torchmetrics[/\\]|"
    r"[/\\]torch[/\\](optim[/\\]lr_scheduler|utils[/\\]tensorboard|serialization|distributed[/\\]checkpoint)"
)
_UPDATES = _search(  # file: function
    r"[/\\]torch[/\\](_tensor\.py:Tensor\.backward$|autograd[/\\]\w+\.py:(backward|grad|_engine_run_backward)$|"
    r"optim[/\\](?!lr_scheduler)\w+\.py:.*(\.step|profile_hook_step.*)$)"
)
_CALLBACK = re.compile(r"(^|\.)on_\w+$")  # as trainers call them
_ROOTS = re.compile(r"^.*[/\\](?:site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]")


Function = tuple[str, str]  # file and name


class _Call(Struct, frozen=True):
    """A line of the user's code and the function that it calls; `callee` is empty if the line itself takes the time."""

    line: Spot
    callee: str
    kind: CallKind


class Training(Struct, frozen=True):
    """Functions of the training.

    `loops` call an optimizer's step or request an iterator from a loader. `path` lead to a backward pass or an
    optimizer's step. `computing` are functions of the user's code below which modules run with gradients.
    """

    loops: Set[Function] = frozenset()
    path: Set[Function] = frozenset()
    computing: Set[Function] = frozenset()


def call_samples(
    sampler: StackSampler,
    origin_ns: int,
    steps: Steps,
    loop: LoopLines,
    naming: Naming,
    grad_off_ns: Intervals,
) -> tuple[CallLooks | None, tuple[str, ...]]:
    """The samples from the first step to the last, on the run's clock, and the names of the called functions.

    `grad_off_ns`: when gradients were switched off, [n, 2], on the clock of the samples.
    """
    samples = sampler.samples
    if samples is None:
        return None, ()
    t_ns = np.array(samples.t_ns, np.int64)
    at_ns = t_ns - origin_ns
    rows = np.flatnonzero((at_ns >= steps.start_ns.min(initial=NEVER)) & (at_ns <= steps.end_ns.max(initial=0)))
    numbers = np.array(samples.stack, np.int64)[rows]
    if not len(numbers):
        return None, ()
    states, of = np.unique(2 * numbers + covers(grad_off_ns, t_ns[rows]), return_inverse=True)
    stacks = [(samples.stacks[state // 2], bool(state % 2)) for state in states.tolist()]
    training = training_of(stacks, np.bincount(of).tolist(), loop)
    inner = [next(iter(users_lines(stack)), None) for stack, _ in stacks]
    pairs = [calls_of_stack(stack, training, loop, grad_off=off) for stack, off in stacks]
    choices = _choose(pairs, inner, of.tolist())
    calls = [call or training_line(stack) for call, (stack, _) in zip(choices, stacks, strict=True)]
    names = tuple(dict.fromkeys(call.callee for call in calls if call is not None))
    within = [spot if call is not None else None for spot, call in zip(inner, calls, strict=True)]
    columns = CallLooks(
        t_ns=at_ns[rows],
        place=np.array([-1 if c is None else naming.number(c.line) for c in calls], np.int32)[of],
        callee=np.array([-1 if c is None else names.index(c.callee) for c in calls], np.int32)[of],
        within=np.array([naming.number(spot) for spot in within], np.int32)[of],
        kind=np.array([0 if c is None else CALL_KINDS.index(c.kind) for c in calls], np.uint8)[of],
        exact=sampler.is_exact,
        holds_lock=np.array(samples.holds_lock, np.uint8)[rows] if samples.holds_lock else np.empty(0, np.uint8),
    )
    return columns, names


def own_batches(samples: CallLooks | None, steps: Steps) -> OwnBatches | None:
    """How much of the steps without a profiler the loop spends on making its batches; None without samples."""
    if samples is None or not (beside := steps.phase == Phase.MEASURED).any():
        return None
    took_ns = np.diff(samples.t_ns, prepend=samples.t_ns[:1])
    rows = covers(np.stack((steps.start_ns[beside], steps.end_ns[beside]), axis=1), samples.t_ns)
    makes = rows & (samples.place >= 0) & (samples.kind == CALL_KINDS.index("batch"))
    return OwnBatches(int(rows.sum()), int(took_ns[rows].sum()), int(makes.sum()), int(took_ns[makes].sum()))


def training_of(stacks: Sequence[tuple[Stack, bool]], counts: Sequence[int], loop: LoopLines) -> Training:
    """What stacks show of the training. Each stack comes with whether gradients were off; `counts` are its samples."""
    path: set[Function] = set()
    appearances, computes = Counter[Function](), Counter[Function]()
    for (stack, off), count in zip(stacks, counts, strict=True):
        for i in reversed(range(len(stack))):
            if _UPDATES(f"{stack[i][0]}:{stack[i][2]}"):
                path.update(_function(spot) for spot in stack[i + 1 :])
                break
        users = dict[Function, bool]()
        trains = beside = False
        for spot, outer in zip_longest(stack, stack[1:]):
            if owners[spot[0]] is Owner.USER:
                trains |= outer is not None and spot[2].endswith(".forward") and _trains(outer)
                users[_function(spot)] = users.get(_function(spot), False) or (trains and not beside and not off)
            trains, beside = trains or _trains(spot), beside or _is_beside(spot)
        appearances.update(dict.fromkeys(users, count))
        computes.update({function: count for function, computing in users.items() if computing})
    computing = {function for function, count in computes.items() if count >= _COMPUTES * appearances[function]}
    loops = {_function(spot) for spot in (*loop.step_lines, *loop.update)}
    return Training(loops, path, computing)


def calls_of_stack(
    stack: Stack, training: Training, loop: LoopLines, *, grad_off: bool = False
) -> tuple[_Call | None, _Call | None]:
    """Two candidates for the call that a whole stack shows; None for calls that train or load, and for gpulab's own.

    The first is the library's function that the user's innermost line has called. The second is the user's function,
    or the line of the loop, that takes the time. If a library runs the loop, everything off its path to the updates is
    a call.
    """
    end = next((i for i, spot in enumerate(stack) if owners[spot[0]] is Owner.RUNNER), len(stack))
    stack = stack[:end]
    users = [i for i, spot in enumerate(stack) if owners[spot[0]] is Owner.USER]
    if not users or is_ours(stack) or any(_LOADS(spot[0]) or _EXCHANGES(spot[0]) for spot in stack):
        return None, None
    makes_batch = loop.makes_batch(tuple(stack[i] for i in users))
    kind: CallKind = "batch" if makes_batch else "own"
    inner = users[0]
    aside = next((i for i in range(inner) if _function(stack[i]) in training.path), inner)
    below = stack[:aside][::-1]
    library = None
    of_library = aside < inner or stack[inner] not in loop.step_lines
    if of_library and not _is_training(below, grad_off) and (callee := callee_of(below)):
        library = _Call(stack[inner], callee, "batch" if makes_batch else "library")
    inside = next((i for i in users if _function(stack[i]) in training.loops), None)
    if inside is None:
        return library, None
    for i in (i for i in users[::-1] if i < inside and not stack[i][2].endswith(">")):  # a comprehension: its line
        caller = stack[next(j for j in users if j > i)]
        if _is_callback(stack, i) or (not makes_batch and loop.is_aside(caller)):
            return library, _Call(caller, _display_name(stack[i][2]), "aside")
        if _function(stack[i]) not in training.path | training.computing:
            return library, _Call(caller, _display_name(stack[i][2]), kind)
    if library is None and stack[inside] not in loop.step_lines and not _is_training(stack[:inside], grad_off):
        return None, _Call(stack[inside], "", kind)
    return library, None


def training_line(stack: Stack) -> _Call | None:
    """The user's innermost line of the training itself; None within an update, which belongs to all lines."""
    line = next(iter(users_lines(stack)), None)
    if line is None or any(_LOADS(spot[0]) or _EXCHANGES(spot[0]) for spot in stack):
        return None
    below = stack[: stack.index(line)]
    update = next((spot[2] for spot in below[::-1] if _UPDATES(f"{spot[0]}:{spot[2]}")), "")
    if update and update != "grad":
        return None
    return _Call(line, "", "layer" if any(_MODULES(spot[0]) for spot in below) else "operator")


def _function(spot: Spot) -> Function:
    return spot[0], spot[2]


def _is_callback(stack: Stack, i: int) -> bool:
    """Whether frame `i` is a function of the user's code that a trainer calls as a callback."""
    return bool(
        owners[stack[i][0]] is Owner.USER and _CALLBACK.search(stack[i][2]) and owners[stack[i + 1][0]] is Owner.LIBRARY
    )


def _is_training(frames: Sequence[Spot], grad_off: bool) -> bool:
    """Whether modules run with gradients, or parameters are updated."""
    trains = any(_trains(spot) and not (grad_off and _RUNS(spot[0])) for spot in frames)
    return trains and not any(_is_beside(spot) for spot in frames)


def _trains(spot: Spot) -> bool:
    file, _, function = spot
    if _TENSORS(file):
        return function == "Tensor.backward"
    return bool(_TRAINS(file)) and (not _MODULES(file) or "_call_impl" in function)


def _is_beside(spot: Spot) -> bool:
    """Whether the frame neither trains nor computes. A scheduler's wrapper of the optimizer's step does train."""
    return bool(_BESIDE(spot[0])) and "<locals>" not in spot[2]


def callee_of(frames: Sequence[Spot]) -> str:
    """The library's function that a user's line has called, as a user writes it; `frames` go from the line inwards.

    That is the outermost public one, else the outermost. Empty without such a function, and for PyTorch's own
    functions, which compute.
    """
    library = [spot for spot in frames if owners[spot[0]] is Owner.LIBRARY and "<" not in spot[2]]
    candidates = [(spot, module) for spot in library if (module := _module(spot[0]))]
    for spot, module in [pair for pair in candidates if _is_public(pair[0][2])] or candidates[:1]:
        if not _TORCH.search(spot[0]) or _is_beside(spot):
            return _public_name(module, spot[2])
        if not any(_is_beside(s) for s in frames):
            return ""
    return ""


def _is_public(function: str) -> bool:
    return not any(re.match(r"_(?!_)", part) for part in function.split("."))


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
    """The name in the outermost package that holds the function: `sklearn.metrics.roc_auc_score`."""
    top, parts = function.partition(".")[0], module.split(".")
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        if top in vars(sys.modules[package]) if package in sys.modules else False:
            return _display_name(f"{package}.{function}")
    return _display_name(f"{'.'.join(part for part in parts if not part.startswith('_'))}.{function}")


def _display_name(function: str) -> str:
    return function.replace("<locals>.", "").removesuffix(".__call__").removesuffix(".__init__")


def _choose(
    pairs: Sequence[tuple[_Call | None, _Call | None]], inner: Sequence[Spot | None], numbers: Sequence[int]
) -> Sequence[_Call | None]:
    """One call for each stack: the user's function, or the library's call that has nearly all of its samples.

    If a line and its calls take time, the one with most samples is named for all. `inner`: the user's innermost line of
    each stack.
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
    choices: list[_Call | None] = []
    for (library, own), innermost in zip(pairs, inner, strict=True):
        line = None if library is None else library.line
        if own is not None and not own.callee:
            line = own.line
            if line not in by_line or counts[by_line[line]] < counts[own]:
                choices.append(own)
                continue
        elif own is not None:
            line = max(inside[own], key=lambda spot: inside[own][spot], default=None)
            if line not in by_line or counts[by_line[line]] < _NEARLY_ALL * counts[own]:
                choices.append(own)
                continue
            line = line if line == innermost else None
        choices.append(None if line is None else by_line[line])
    return choices


def stack_samples(sampler: StackSampler | None, origin_ns: int, loop: LoopLines, naming: Naming) -> StackSamples | None:
    """The samples on the run's clock, which starts at `origin_ns`."""
    samples = sampler.samples if sampler is not None else None
    if sampler is None or samples is None or not len(samples.t_ns):
        return None
    users = [users_lines(stack) for stack in samples.stacks]
    spots = [lines[0] if lines else None for lines in users]
    add_excerpts([spots[i] for i in samples.stack], naming)

    def column(each: Iterable[int], dtype: type[np.integer]) -> np.ndarray:
        return np.array(list(each), dtype)[np.asarray(samples.stack, np.int64)]

    return StackSamples(
        t_ns=np.array(samples.t_ns, np.int64) - origin_ns,
        place=column(map(naming.number, spots), np.int32),
        began_ns=samples.began_ns - origin_ns,
        exact=sampler.is_exact,
        prepares_batch=column(map(loop.makes_batch, users), np.uint8),
    )


def loading_samples(samples: Sequence[ThreadSamples], naming: Naming) -> LoadingLooks | None:
    """How often the threads that make batches were at each line; None without samples."""
    if not any(len(thread.t_ns) for thread in samples):
        return None
    counts: Counter[tuple[Spot | None, bool]] = Counter()
    for thread in samples:
        lines = [users_lines(stack) for stack in thread.stacks]
        rows = [(line[0] if line else None, is_collating(s)) for line, s in zip(lines, thread.stacks, strict=True)]
        counts.update(rows[i] for i in thread.stack if not is_ours(thread.stacks[i]))
    add_excerpts([spot for spot, _ in counts.elements()], naming)
    return LoadingLooks(
        place=np.array([naming.number(spot) for spot, _ in counts], np.int32),
        collating=np.array([collating for _, collating in counts], np.uint8),
        count=np.array(list(counts.values()), np.int64),
    )


def add_excerpts(spots: Iterable[Spot | None], naming: Naming) -> None:
    """Record the source around the lines with most samples."""
    for spot, _ in Counter(spot for spot in spots if spot is not None).most_common(EXCERPTS):
        naming.excerpt(spot)


def users_lines(stack: Stack) -> Stack:
    """The user's own lines of a whole stack, up to the frame that runs the user's code."""
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


def is_ours(stack: Stack) -> bool:
    """Whether gpulab's own code is innermost."""
    return bool(stack) and owners[stack[0][0]] is Owner.GPULAB
