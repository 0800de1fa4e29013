"""Hear of saving, logging, garbage collection, compilation and code without gradients, and put everything back.

Only libraries that the user's code has imported are touched, whenever that is; `print` is not: code that passes it on
to a worker process could not, while it is another function.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from time import perf_counter_ns
from types import FrameType
from typing import Any

from msgspec import Struct

from gpulab.capture.pauses.pauses import SHORT_MOST, SHORTEST_NS, Pauses
from gpulab.capture.stacks.stack import Spot
from gpulab.formatting import duration
from gpulab.run import PauseKind
from gpulab.tape.marks import Kind, Tape
from gpulab.torch_hooks.patching import remove_callback, replaced
from gpulab.user_code import is_users_code

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_SCHEDULERS = ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "CosineAnnealingWarmRestarts")

CALLS: tuple[tuple[PauseKind, str, str, str], ...] = (
    *(("evaluation", f"{at}.loops.evaluation_loop", "_EvaluationLoop", "run") for at in _LIGHTNING),
    *(
        ("logging", f"{at}.trainer.connectors.logger_connector.logger_connector", "_LoggerConnector", "log_metrics")
        for at in _LIGHTNING
    ),
    ("evaluation", "transformers.trainer", "Trainer", "evaluate"),
    ("logging", "transformers.trainer", "Trainer", "log"),
    ("callback", "transformers.trainer_callback", "CallbackHandler", "call_event"),
    *(("callback", "torch.optim.lr_scheduler", owner, "step") for owner in _SCHEDULERS),
)
# Lightning names each thing that it does.
ACTIONS = tuple((f"{at}.profilers.profiler", "Profiler", "profile") for at in _LIGHTNING)
_LEAST_TOLD = 0.05  # ours, of a call: a smaller part of it is not named

_ACTION = re.compile(r"\[Callback\](?P<callback>\w+).*\.(?P<hook>\w+)")


class Part(Struct, frozen=True):
    """A call inside of a timed one that would be a pause by itself."""

    kind: PauseKind
    took_ns: int
    name: str
    is_innermost: bool = True  # it has made no such call itself


def kind_of_call(kind: PauseKind, parts: Sequence[Part], took_ns: int) -> PauseKind:
    """A callback that saves is there for saving, whatever else it does; else what takes at least half of it counts."""
    if kind != "callback":
        return kind
    if any(part.kind == "checkpoint_save" for part in parts):
        return "checkpoint_save"
    return next((part.kind for part in parts if 2 * part.took_ns >= took_ns), kind)


def with_part(detail: str, parts: Sequence[Part], took_ns: int) -> str:
    """What takes longest inside is named, with all of its time."""
    sums: dict[str, int] = {}
    for part in parts:
        if part.is_innermost:
            sums[part.name] = sums.get(part.name, 0) + part.took_ns
    name, longest_ns = max(sums.items(), key=lambda item: item[1], default=("", 0))
    if not name or longest_ns < _LEAST_TOLD * took_ns:
        return detail
    return f"{detail}, of it {duration(longest_ns / 1e3)} in {name}"


def callback_name(action: str) -> str:
    """Of Lightning's name for what it does: the callback and its hook; empty for what is no callback's."""
    match = _ACTION.fullmatch(action)
    return f"{match['callback']}.{match['hook']}" if match is not None else ""


def event_detail(owner: str, args: tuple[Any, ...]) -> tuple[str, Spot | None]:
    """The event that transformers hands to its callbacks, with the user's one that hears it, and where that is."""
    if owner != "CallbackHandler" or len(args) < 2:
        return "", None
    handler, event = args[:2]
    users = [(callback, spot) for callback in handler.callbacks if (spot := method_spot(callback, event))]
    names = ", ".join(type(callback).__name__ for callback, _ in users) or "callbacks"
    return f"{names}.{event}", users[0][1] if len(users) == 1 else None


def method_spot(callback: Any, name: str) -> Spot | None:
    """Where a method of the user's is written; None for a library's."""
    code = getattr(getattr(type(callback), name, None), "__code__", None)
    if code is None or not is_users_code(code):
        return None
    return code.co_filename, code.co_firstlineno, code.co_qualname


def calling_callback(frame: FrameType | None) -> Any:
    """The callback that Lightning's loop over its callbacks is at, in the frame that entered an action."""
    return None if frame is None else frame.f_locals.get("callback")


@contextmanager
def both(action: Any, ours: Any) -> Iterator[Any]:
    """An action of Lightning's, timed by us."""
    with ours, action as name:
        yield name


class Target(Struct, frozen=True):
    """A function or method: `owner` is a path within the module, empty for the module itself."""

    kind: PauseKind
    module: str
    owner: str
    name: str


def _methods(kind: PauseKind, module: str, owner: str, *names: str) -> tuple[Target, ...]:
    return tuple(Target(kind, module, owner, name) for name in names)


# Nested ones count once, by the outermost. Lightning and transformers: their own saving around torch.save. What NumPy
# saves need not be a checkpoint: `detail` says who saved, and a rule calls it a file where nobody else did.
TARGETS: tuple[Target, ...] = (
    *_methods("checkpoint_save", "torch", "", "save"),
    *_methods("checkpoint_save", "torch.serialization", "", "save"),
    *_methods("checkpoint_save", "torch.distributed.checkpoint", "", "save"),
    *_methods("checkpoint_save", "safetensors.torch", "", "save_file", "serialize_file"),
    *_methods("checkpoint_save", "numpy", "", "save", "savez", "savez_compressed"),
    *_methods("checkpoint_save", "os", "", "fsync", "fdatasync"),  # until the disk has it: part of what saving takes
    *_methods("checkpoint_save", "lightning.pytorch.trainer.trainer", "Trainer", "save_checkpoint"),
    *_methods("checkpoint_save", "pytorch_lightning.trainer.trainer", "Trainer", "save_checkpoint"),
    *_methods("checkpoint_save", "transformers.trainer", "Trainer", "_save_checkpoint", "save_model"),
    *_methods("logging", "logging", "Handler", "handle"),
    *_methods(
        "logging",
        "torch.utils.tensorboard.writer",
        "SummaryWriter",
        *("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "add_video"),
        *("add_audio", "add_text", "add_graph", "add_embedding", "add_pr_curve", "add_mesh", "add_hparams", "flush"),
    ),
    *_methods("logging", "matplotlib.backend_bases", "FigureCanvasBase", "print_figure"),
    *_methods("logging", "wandb.sdk.wandb_run", "Run", "log"),
    *_methods("logging", "mlflow.tracking.client", "MlflowClient", "log_metric", "log_batch", "log_artifact"),
    *(Target(*call) for call in CALLS),
)
_BESIDE_TRAINING: tuple[PauseKind, ...] = ("evaluation", "callback")  # none of these where training went on inside


class _Outer(Struct, frozen=True):
    """A timed call that goes on: since when, and what was called inside."""

    since_ns: int
    parts: list[Part]
    before: int = 0  # parts of the outermost call when this one began

    def __bool__(self) -> bool:
        return self is not _NOTHING_TIMED


_NOTHING_TIMED = _Outer(0, [])


class PauseHooks:
    """The hooks of one run. `look` from time to time: it touches what was imported since."""

    def __init__(self, pauses: Pauses, tape: Tape, undo: ExitStack) -> None:
        self._pauses = pauses
        self._tape = tape
        self._off_ns: list[int] = []  # since when gradients are off, by switch
        self._short = 0  # lines of short ones that were noted
        self._undo = undo
        self._waiting = set(TARGETS)
        self._modules = 0
        self._outer = _NOTHING_TIMED  # the call that is timed now
        self._actions = set(ACTIONS)
        self._compiling_ns = 0
        self._collecting_ns = 0
        self._compiled = False  # compilation is heard

    def install(self) -> None:
        """Touch what is imported by now; `undo` takes everything out again."""
        gc.callbacks.append(self._collects)
        self._undo.callback(remove_callback, gc.callbacks, self._collects)
        torch: Any = sys.modules["torch"]
        for switch in (torch.no_grad, torch.inference_mode):
            self._undo.enter_context(replaced(switch, "__enter__", self._switches_off))
            self._undo.enter_context(replaced(switch, "__exit__", self._switches_on))
        self._undo.enter_context(replaced(torch.nn.Module, "train", self._switches_mode))
        self.look()

    def look(self) -> None:
        """Touch what was imported since the last look. Cheap where nothing was."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        for target in [t for t in self._waiting if t.module in sys.modules]:
            owner = _owner(target)
            if owner is not None:
                self._waiting.discard(target)
                with suppress(AttributeError, TypeError):  # another version of the library
                    self._undo.enter_context(replaced(owner, target.name, self._timed(target)))
        for module, owner_name, name in [a for a in self._actions if a[0] in sys.modules]:
            profiler = vars(sys.modules[module]).get(owner_name)
            if profiler is not None:
                self._actions.discard((module, owner_name, name))
                self._undo.enter_context(replaced(profiler, name, self._times_action))
        if not self._compiled and "torch._dynamo.callback" in sys.modules:
            self._hear_compilation(sys.modules["torch._dynamo.callback"])

    def _timed(self, target: Target) -> Callable[[Any], Any]:
        """Wraps a function so that the time it takes counts as a pause of that kind."""

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if not self._pauses.hears():
                    return original(*args, **kwargs)
                outer, start_ns = self._begin(), perf_counter_ns()
                try:
                    return original(*args, **kwargs)
                finally:
                    end_ns = perf_counter_ns()
                    spot = None
                    detail = f"{target.owner or target.module}.{target.name}{_written(args, target.kind)}"
                    if not outer and end_ns - start_ns >= SHORTEST_NS and target.kind == "callback":
                        event, spot = event_detail(target.owner, args)
                        detail = event or detail
                    self._end(target.kind, outer, start_ns, end_ns, detail, sys._getframe().f_back, spot)

            return timed

        return wrap

    def _begin(self) -> _Outer:
        """A call is made; what is made inside of it is a part of it. Returns what it is itself a part of."""
        outer = self._outer
        parts = outer.parts if outer else []
        self._outer = _Outer(perf_counter_ns(), parts, len(parts))
        return outer

    def _end(
        self,
        kind: PauseKind,
        outer: _Outer,
        start_ns: int,
        end_ns: int,
        detail: str,
        frame: FrameType | None,
        spot: Spot | None = None,
    ) -> None:
        ended, self._outer = self._outer, outer
        if outer:
            ended.parts.append(Part(kind, end_ns - start_ns, detail, len(ended.parts) == ended.before))
        elif kind not in _BESIDE_TRAINING or not self._tape.trained_since(ended.since_ns):
            kind = kind_of_call(kind, ended.parts, end_ns - start_ns)
            detail = with_part(detail, ended.parts, end_ns - start_ns) if end_ns - start_ns >= SHORTEST_NS else detail
            self._pauses.add(kind, start_ns, end_ns, frame, detail, spot)

    def _times_action(self, original: Any) -> Any:
        """Lightning names what it does: of that, what its callbacks do."""

        @functools.wraps(original)
        def profile(profiler: Any, action: str) -> Any:
            name = callback_name(action) if self._pauses.hears() else ""
            if not name:
                return original(profiler, action)
            return both(original(profiler, action), self._action(name, sys._getframe().f_back))

        return profile

    @contextmanager
    def _action(self, name: str, frame: FrameType | None) -> Iterator[None]:
        outer, start_ns = self._begin(), perf_counter_ns()
        try:
            yield
        finally:
            end_ns = perf_counter_ns()
            spot = None
            if end_ns - start_ns >= SHORTEST_NS:
                spot = method_spot(calling_callback(frame), name.rpartition(".")[2])
            self._end("callback", outer, start_ns, end_ns, name, frame, spot)

    def _switches_off(self, original: Any) -> Any:
        hears, note, off_ns = self._pauses.hears, self._tape.note, self._off_ns

        @functools.wraps(original)
        def enter(switch: Any) -> Any:
            if hears():
                off_ns.append(note(Kind.GRAD_OFF, 0))
            return original(switch)

        return enter

    def _switches_on(self, original: Any) -> Any:
        hears, note, off_ns = self._pauses.hears, self._tape.note, self._off_ns

        @functools.wraps(original)
        def exit(switch: Any, *error: Any) -> Any:
            if hears():
                t_ns = note(Kind.GRAD_ON, 0)
                began_ns = off_ns.pop() if off_ns else 0
                if t_ns - began_ns >= SHORTEST_NS or self._short < SHORT_MOST:
                    self._short += t_ns - began_ns < SHORTEST_NS
                    self._pauses.place(t_ns, sys._getframe())
            return original(switch, *error)

        return exit

    def _switches_mode(self, original: Any) -> Any:
        """`model.eval()` and `model.train()`; both switch all modules within, one by one."""
        note, hears = self._tape.note, self._pauses.hears
        switching = False

        @functools.wraps(original)
        def train(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal switching
            if switching or not hears():
                return original(module, *args, **kwargs)
            switching, trains = True, bool(args[0] if args else kwargs.get("mode", True))
            if not trains:
                self._pauses.place(note(Kind.EVAL, 0), sys._getframe().f_back)
            try:
                return original(module, *args, **kwargs)
            finally:
                switching = False
                if trains:
                    self._pauses.place(note(Kind.TRAIN, 0), sys._getframe().f_back)

        return train

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if not self._pauses.hears():
            return
        now_ns = perf_counter_ns()
        if phase == "start":
            self._collecting_ns = now_ns
        elif self._collecting_ns:
            began_ns, self._collecting_ns = self._collecting_ns, 0
            detail = f"generation {info['generation']}"
            self._pauses.add("gc", began_ns, now_ns, sys._getframe().f_back, detail)

    def _hear_compilation(self, module: Any) -> None:
        handler = module.callback_handler
        self._compiled = True
        handler.register_start_callback(self._compiles)
        self._undo.callback(remove_callback, handler.start_callbacks, self._compiles)
        handler.register_end_callback(self._has_compiled)
        self._undo.callback(remove_callback, handler.end_callbacks, self._has_compiled)

    def _compiles(self, *_: Any) -> None:
        if self._pauses.hears():
            self._compiling_ns = perf_counter_ns()

    def _has_compiled(self, *args: Any) -> None:
        if not self._pauses.hears() or not self._compiling_ns:
            return
        began_ns, self._compiling_ns = self._compiling_ns, 0
        detail = str(getattr(args[0], "compile_id", "")) if args else ""
        self._pauses.add("compile", began_ns, perf_counter_ns(), sys._getframe().f_back, detail)


def _owner(target: Target) -> Any:
    """Where that function is; None while the module is still being imported, or has no such thing."""
    owner: Any = sys.modules[target.module]
    if target.owner:
        owner = vars(owner).get(target.owner)
    return owner if owner is not None and hasattr(owner, target.name) else None


def _written(args: tuple[Any, ...], kind: PauseKind) -> str:
    """The name of the file that is written, where an argument is one."""
    if kind != "checkpoint_save":
        return ""
    path = next((a for a in args if isinstance(a, str | os.PathLike)), None)
    return "" if path is None else f": {os.path.basename(os.fspath(path))!s}"


def recompiled_because() -> dict[str, str]:
    """Of each compilation of this process that torch still knows: why it was done again, or what was compiled."""
    utils = sys.modules.get("torch._dynamo.utils")
    try:
        metrics = utils.get_compilation_metrics() if utils is not None else ()
        compilations = {
            str(m.compile_id): (m.co_name, getattr(m, "recompile_reason", None)) for m in metrics if m.co_name
        }
    except Exception:  # torch's own bookkeeping: it has changed its shape before
        return {}
    return {i: f"{name}, again: {why}" if why else str(name) for i, (name, why) in compilations.items()}
