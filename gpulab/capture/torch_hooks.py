"""The hooks that measure a cell: tables of the functions to wrap, and wrappers that write marks or time a call.

Hooked elsewhere: the start of other ranks (`job`), fetches within workers (`fetch_clock`), what a cell uses
(`knobs.observer`).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from threading import get_ident
from time import perf_counter_ns
from types import MethodType
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpulab.capture.arguments import Arguments
from gpulab.capture.pauses import SHORT_MOST, SHORTEST_NS, Pauses
from gpulab.patching.attributes import Args, Hook, KeywordArgs, before_calls, remove_callback, replaced
from gpulab.patching.hook_points import module_calls, step_hooks
from gpulab.tape.marks import Kind, Tape

if TYPE_CHECKING:
    from gpulab.capture.pilot import Pilot


class Point(Struct, frozen=True):
    """A function to wrap, and its marks: before the call, after it, and after it raised, with their arguments."""

    module: str
    owner: str  # a class in that module; empty: the module itself
    name: str
    before: Kind
    after: Kind | None
    failed: Kind | None
    argument: Callable[[Arguments, Args, KeywordArgs], int]
    result: Callable[[Arguments, Any], int] | None = None  # argument of the mark after the call; None: 0


LOADERS = "torch.utils.data.dataloader"
POINTS = (
    Point(LOADERS, "DataLoader", "__iter__", Kind.ITER, Kind.ITERATOR, Kind.ITERATOR, Arguments.loader),
    Point(
        *(LOADERS, "_BaseDataLoaderIter", "__next__", Kind.ASK, Kind.GOT, Kind.END),
        *(Arguments.loader, Arguments.samples),
    ),
    Point("torch.autograd", "", "backward", Kind.BACKWARD, Kind.BACKWARD_END, Kind.BACKWARD_END, Arguments.backward),
    Point("torch.autograd", "", "grad", Kind.GRAD, None, None, Arguments.grad),
    Point("torch.amp", "GradScaler", "step", Kind.SCALE, Kind.SCALED, Kind.SCALE_FAILED, Arguments.scaled),
)  # and each optimizer's step, by torch's own hooks: STEP, STEPPED

# A function, and the method of `Switches` or of `LoadingClock` that wraps it.
SWITCHES = (
    ("torch", "no_grad", "__enter__", "off"),
    ("torch", "no_grad", "__exit__", "on"),
    ("torch", "inference_mode", "__enter__", "off"),
    ("torch", "inference_mode", "__exit__", "on"),
    ("torch.nn", "Module", "train", "mode"),
)
LOADING = (
    (LOADERS, "_MultiProcessingDataLoaderIter", "__init__", "wrap_init"),
    (LOADERS, "_MultiProcessingDataLoaderIter", "_reset", "wrap_reset"),
    (LOADERS, "_MultiProcessingDataLoaderIter", "_next_data", "wrap_next_of_workers"),
    (LOADERS, "_MultiProcessingDataLoaderIter", "_process_data", "wrap_process"),
    (LOADERS, "_SingleProcessDataLoaderIter", "_next_data", "wrap_next_here"),
    ("torch.utils.data._utils.pin_memory", "", "pin_memory", "wrap_pin"),
)
# Timed exactly: such a call may be rare and long, and the last two have no Python frame that stack samples could show.
SAVES = (
    ("torch", "", "save"),
    ("torch.serialization", "", "save"),
    ("os", "", "fsync"),
    ("os", "", "fdatasync"),
)


def install(pilot: Pilot, undo: ExitStack, *, in_ranks: bool = False) -> Hook:
    """Write marks at the calls of this thread; `undo` removes all hooks. Needs torch to be imported.

    Returns the hook of module calls: while it is on, they reach `pilot.module_call`. Until something is compiled,
    `pilot.model_inputs` gets the calls of DistributedDataParallel or, `in_ranks`, of the model trained without it.
    """
    thread = get_ident()
    modules = Hook(lambda: module_calls(pilot.module_call, thread))
    arguments = Arguments(pilot.tape, pilot.evidence, pilot.clock, pilot.facts, pilot.memory)
    before, after = (_optimizer(pilot, thread, kind) for kind in (Kind.STEP, Kind.STEPPED))
    undo.enter_context(step_hooks(after, before))
    for point in POINTS:
        wrap = functools.partial(_wrapped, point=point, pilot=pilot, arguments=arguments, thread=thread)
        undo.enter_context(replaced(_owner(point.module, point.owner), point.name, wrap))
    models = undo.enter_context(ExitStack())
    wrapped = _owner("torch.nn.parallel", "DistributedDataParallel")
    models.enter_context(before_calls(wrapped, "forward", pilot.model_inputs.called))
    models.callback(pilot.model_inputs.close)
    if in_ranks:
        pilot.model_inputs.count_first_model()
    closings = () if pilot.memory is None else (pilot.memory.close,)
    for close in (modules.close, *closings):
        undo.callback(close)
    pilot.compilations.begin(undo)
    undo.enter_context(compile_hook(pilot.compilations.poll, modules.close, models.close, *closings))
    modules.on()
    return modules


def install_pauses(pauses: Pauses, tape: Tape, undo: ExitStack) -> None:
    """Record saving, garbage collection and code without gradients on this thread."""
    collections = Collections(pauses)
    gc.callbacks.append(collections.callback)
    undo.callback(remove_callback, gc.callbacks, collections.callback)
    wrap(SWITCHES, Switches(pauses, tape), undo)
    saves = Saves(pauses)
    for module, owner, name in SAVES:
        if hasattr(of := _owner(module, owner), name):
            undo.enter_context(replaced(of, name, functools.partial(saves.timed, name=f"{module}.{name}")))


def wrap(table: Iterable[tuple[str, str, str, str]], wrappers: object, undo: ExitStack) -> None:
    """Replace each function of the table by `wrappers.METHOD(function)`. Raises AttributeError if one is missing."""
    for module, owner, name, method in table:
        undo.enter_context(replaced(_owner(module, owner), name, getattr(wrappers, method)))


def _owner(module: str, name: str = "") -> Any:
    return getattr(import_module(module), name) if name else import_module(module)


# -- marks -------------------------------------------------------------------------------------------------------------


def _wrapped(original: Any, *, point: Point, pilot: Pilot, arguments: Arguments, thread: int) -> Any:
    before, after, failed = (None if kind is None else int(kind) for kind in (point.before, point.after, point.failed))
    argument = MethodType(point.argument, arguments)
    result_of = None if point.result is None else MethodType(point.result, arguments)
    mark, give_up_or_raise = pilot.tape.mark, pilot.give_up_or_raise
    assert before is not None

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return original(*args, **kwargs)
        try:
            mark(before, argument(args, kwargs), args)
        except Exception as e:
            give_up_or_raise(e)
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            if failed is not None:
                try:
                    mark(failed, 0, e)
                except Exception as fault:
                    give_up_or_raise(fault)
            raise
        if after is not None:
            try:
                mark(after, 0 if result_of is None else result_of(result), result)
            except Exception as e:
                give_up_or_raise(e)
        return result

    return hooked


def _optimizer(pilot: Pilot, thread: int, kind: int) -> Callable[[Any, Args, KeywordArgs], None]:
    mark, give_up_or_raise = pilot.tape.mark, pilot.give_up_or_raise
    facts, memory = (pilot.facts, pilot.memory) if kind == Kind.STEP else (None, None)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() == thread:
            if memory is not None and memory.awaits_update:
                memory.update()
            if facts is not None and (facts.wants_passes or id(optimizer) not in facts.optimizers):
                facts.step(optimizer)
            try:
                mark(kind, id(optimizer), optimizer)
            except Exception as e:
                give_up_or_raise(e)

    return hook


class Switches:
    """Marks when gradients, or training itself, are switched off and on."""

    def __init__(self, pauses: Pauses, tape: Tape) -> None:
        self._pauses, self._note = pauses, tape.note
        self._off_ns: list[int] = []  # since when gradients are off, by switch
        self._short = 0  # short stretches whose lines were recorded

    def off(self, original: Any) -> Any:
        """Wrap `no_grad.__enter__`."""

        @functools.wraps(original)
        def enter(switch: Any) -> Any:
            if self._pauses.is_active():
                self._off_ns.append(self._note(Kind.GRAD_OFF, 0))
            return original(switch)

        return enter

    def on(self, original: Any) -> Any:
        """Wrap `no_grad.__exit__`."""

        @functools.wraps(original)
        def exit(switch: Any, *error: Any) -> Any:
            if self._pauses.is_active():
                t_ns = self._note(Kind.GRAD_ON, 0)
                began_ns = self._off_ns.pop() if self._off_ns else 0
                if t_ns - began_ns >= SHORTEST_NS or self._short < SHORT_MOST:
                    self._short += t_ns - began_ns < SHORTEST_NS
                    self._pauses.place(t_ns, sys._getframe())
            return original(switch, *error)

        return exit

    def mode(self, original: Any) -> Any:
        """Wrap `Module.train`, which `eval` calls, and which calls itself for each inner module."""
        switching = False

        @functools.wraps(original)
        def train(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal switching
            if switching or not self._pauses.is_active():
                return original(module, *args, **kwargs)
            switching, trains = True, bool(args[0] if args else kwargs.get("mode", True))
            if not trains:
                self._pauses.place(self._note(Kind.EVAL, 0), sys._getframe().f_back)
            try:
                return original(module, *args, **kwargs)
            finally:
                switching = False
                if trains:
                    self._pauses.place(self._note(Kind.TRAIN, 0), sys._getframe().f_back)

        return train


# -- timed exactly -----------------------------------------------------------------------------------------------------


class Saves:
    """Times functions that write files; of nested calls only the outermost."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        self._saving = False

    def timed(self, original: Any, *, name: str) -> Any:
        """Wrap `original` so that its calls are recorded as pauses."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._saving or not self._pauses.is_active():
                return original(*args, **kwargs)
            self._saving, began_ns = True, perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                self._saving = False
                path = next((os.path.basename(os.fspath(a)) for a in args if isinstance(a, str | os.PathLike)), None)
                detail = name if path is None else f"{name}: {path!s}"
                self._pauses.add("checkpoint_save", began_ns, perf_counter_ns(), sys._getframe().f_back, detail)

        return save


class Collections:
    """Times Python's garbage collection."""

    def __init__(self, pauses: Pauses) -> None:
        self._pauses = pauses
        self._began_ns = 0

    def callback(self, phase: str, info: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        if not self._pauses.is_active():
            return
        if phase == "start":
            self._began_ns = perf_counter_ns()
        elif self._began_ns:
            began_ns, self._began_ns = self._began_ns, 0
            detail = f"generation {info['generation']}"
            self._pauses.add("gc", began_ns, perf_counter_ns(), sys._getframe().f_back, detail)


class Compilations:
    """Times and marks each compilation by torch on the thread that created it."""

    def __init__(self, tape: Tape, pauses: Pauses) -> None:
        self._note, self._pauses = tape.note, pauses
        self._undo: ExitStack | None = None
        self._began_ns = 0
        self._graphs = _graphs()

    def begin(self, undo: ExitStack) -> None:
        """Register the callbacks at the next poll after Dynamo is imported."""
        self._undo = undo

    def poll(self) -> None:
        """Register the callbacks if Dynamo is imported by now."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is None or self._undo is None:
            return
        undo, self._undo = self._undo, None
        for register, callbacks, callback in (
            (handler.register_start_callback, handler.start_callbacks, self._start),
            (handler.register_end_callback, handler.end_callbacks, self._finish),
        ):
            register(callback)
            undo.callback(remove_callback, callbacks, callback)

    def _start(self, *_: Any) -> None:
        if self._pauses.is_active():
            self._began_ns = perf_counter_ns()

    def _finish(self, *args: Any) -> None:
        before, self._graphs = self._graphs, _graphs()
        if not self._pauses.is_active():
            return
        if self._graphs > before:
            self._note(Kind.COMPILE, 0)
        if self._began_ns:
            began_ns, self._began_ns = self._began_ns, 0
            detail = str(getattr(args[0], "compile_id", "")) if args else ""
            self._pauses.add("compile", began_ns, perf_counter_ns(), sys._getframe().f_back, detail)


def _graphs() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


# -- compiling ---------------------------------------------------------------------------------------------------------


@contextmanager
def compile_hook(compiled: Callable[[], None], *closings: Callable[[], None]) -> Iterator[None]:
    """Call `closings` before torch.compile is used, or at once if it was used before, and `compiled` after each use.

    A library that wraps torch.compile at its import (Lightning) keeps a reference to our wrapper. After the run the
    wrapper passes everything through and refers to nothing of the run.
    """
    before, after = [*closings], [compiled]

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            for call in before:
                call()
            result = original(*args, **kwargs)
            for call in after:
                call()
            return result

        return compile

    if _something_is_compiled():
        for call in closings:
            call()
    try:
        with replaced(_owner("torch"), "compile", wrap):
            yield
    finally:
        before.clear()
        after.clear()


def _something_is_compiled() -> bool:
    """Whether torch.compile was used in this process. Optimizers load Dynamo too, but without a back end."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and any(b is not None for b in getattr(dynamo, "cached_backends", {}).values())
