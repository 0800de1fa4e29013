"""See what a cell uses while it runs as written, so that every knob can tell its present value and its limits.

Watched, on the entering thread only: `DataLoader.__iter__`, `GradScaler.scale`, `autocast.__enter__`; optimizer steps
and backward passes for a few steps at a time, at the beginning and anew when a loader is iterated or an optimizer steps
for the first time; module calls for a few outermost calls, then as well, and when a first backward pass comes.
All of it is put back. Objects are known weakly and only as long as the code runs; what is kept are facts.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from msgspec.structs import replace

from gpulab.knobs.description import dtype_name, observed_loader, observed_module, observed_optimizer
from gpulab.knobs.observation import (
    OPERATORS,
    Observation,
    ObservedLoader,
    ObservedModule,
    ObservedOptimizer,
    Shape,
    StepInputs,
    trace_counts,
)
from gpulab.run import Device, Run
from gpulab.timeline.labels import differentiates_twice
from gpulab.torch_hooks.hook_points import Call, Layer, around_outermost, step_hooks
from gpulab.torch_hooks.patching import Args, KeywordArgs, heard_before, replaced

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

CALLS_AT_A_TIME = 16  # outermost module calls
TIMES = 12  # that such calls are watched, at most
STEPS_AT_A_TIME, PASSES_AT_A_TIME = 5, 512  # optimizer steps, and backward passes where none comes
OBJECTS_KEPT = 32  # of each kind

_WORKER_DIED = "DataLoader worker"  # torch's signal handler raises this wherever the main thread is
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
}

Seen = TypeVar("Seen")
Given = ParamSpec("Given")


class Noted(Generic[Seen]):
    """Facts of objects in the order they were met; the objects themselves are known weakly, until `forget`."""

    def __init__(self) -> None:
        self.facts: list[Seen] = []
        self._met: dict[int, tuple[weakref.ref[Any], int]] = {}

    def place(self, thing: object) -> int | None:
        """Where its facts are; None where it was not met."""
        met = self._met.get(id(thing))
        return met[1] if met is not None and met[0]() is thing else None  # an id returns when its object is gone

    def add(self, thing: object, facts: Seen) -> int | None:
        """Keep the facts of an object not met before; None where there are too many."""
        if len(self.facts) >= OBJECTS_KEPT:
            return None
        self._met[id(thing)] = weakref.ref(thing), len(self.facts)
        self.facts.append(facts)
        return len(self.facts) - 1

    def forget(self) -> None:
        self._met.clear()


class Observed:
    """What was seen. `observation` joins it with the record of the same run."""

    def __init__(self) -> None:
        self.loaders: Noted[ObservedLoader] = Noted()
        self.optimizers: Noted[ObservedOptimizer] = Noted()
        self.modules: Noted[ObservedModule] = Noted()
        self.tf32: bool | None = None  # torch's setting while modules were called; None: unknown
        self.grad_scaler = False
        self.checks: set[str] = set()
        self.inputs = ObservedInputs()

    def observation(self, run: Run) -> Observation:
        """The observation of `run`, the run that was observed."""
        counts = Counter(trace_counts(run, OPERATORS) or {})
        return Observation(
            device=run.device,
            loaders=tuple(sorted(self.loaders.facts, key=lambda seen: seen.record != run.loader)),
            optimizers=tuple(self.optimizers.facts),
            modules=tuple(sorted(self.modules.facts, key=lambda seen: (not seen.trained, -seen.parameter_count))),
            operators=frozenset(counts),
            tf32=self.tf32 if has_ampere_units(run.device) else None,
            attention=attention_backend(counts),
            compute_threads=run.environment.compute_threads,
            grad_scaler=self.grad_scaler,
            differentiates_twice=differentiates_twice(run),
            checks=frozenset(self.checks),
            step_inputs=self.inputs.of_a_step,
        )


@contextmanager
def observe(times: int = TIMES) -> Iterator[Observed]:
    """Note what the code inside uses; `times`: how often a few outermost module calls are watched. Imports torch."""
    from torch.amp import GradScaler
    from torch.distributions import Distribution
    from torch.utils.data import DataLoader

    seen = Observed()
    watch = Watch(seen, times)
    with ExitStack() as undo:
        undo.callback(watch.close)
        undo.enter_context(heard_before(DataLoader, "__iter__", watch.iterated))
        undo.enter_context(heard_before(GradScaler, "scale", watch.scaled))
        undo.enter_context(heard_before(Distribution, "__init__", watch.validated))
        undo.enter_context(_autocast(watch))
        watch.begin()
        yield seen


def guarded(note: Callable[Given, None]) -> Callable[Given, None]:
    """A fault of ours must not become the user's: what cannot be described is not noted."""

    @functools.wraps(note)
    def careful(*args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            note(*args, **kwargs)
        except Exception as e:
            if str(e).startswith(_WORKER_DIED):
                raise

    return careful


class Watch:
    """Hears what happens and notes it. Deaf on other threads and after `close`."""

    def __init__(self, seen: Observed, times: int = TIMES) -> None:
        self._seen: Observed | None = seen
        self._thread = get_ident()
        self._calls_left = 0
        self._times_left = times
        self._steps_left = self._passes_left = 0
        self._undo_steps: ExitStack | None = None
        self._hears_passes = False
        self._undo_modules: ExitStack | None = None
        self._since_backward: set[int] = set()  # places of modules that were called to be trained
        self._backward_seen = 0
        self.current: int | None = None  # place of the outermost module that runs and is watched

    @property
    def hears(self) -> bool:
        """Whether this thread is the one that is watched, and still is."""
        return self._seen is not None and get_ident() == self._thread

    def close(self) -> None:
        """The code is over: keep facts, know no object any more."""
        self.look_away()
        self._rest()
        seen, self._seen = self._seen, None
        if seen is None:
            return
        if seen.tf32 is None:
            seen.tf32 = tf32_setting()
        for noted in (seen.loaders, seen.optimizers, seen.modules):
            noted.forget()

    # -- loaders, optimizers, gradients ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hear the next few steps, and watch the first modules that they call."""
        self._steps_left, self._passes_left = STEPS_AT_A_TIME, PASSES_AT_A_TIME
        if self._undo_steps is None and self._seen is not None:
            self._undo_steps = ExitStack()
            self._undo_steps.enter_context(step_hooks(self.stepped))
        self.look()

    def _hear_passes(self) -> None:
        """Hear backward passes as well. Only once the code runs: so this hook is over all others, and goes for good."""
        import torch

        if self._undo_steps is not None and not self._hears_passes:
            self._hears_passes = True
            self._undo_steps.enter_context(heard_before(torch.autograd, "backward", self.backward))

    def _rest(self) -> None:
        """Hear no steps. Not from an optimizer's hook, of which torch is calling one after the other."""
        undo, self._undo_steps, self._hears_passes = self._undo_steps, None, False
        if undo is not None:
            undo.close()
            if self._seen is not None:
                self._seen.inputs.missed()

    @guarded
    def iterated(self, args: Args, kwargs: KeywordArgs) -> None:
        """A DataLoader is asked for an iterator."""
        loader = args[0]
        if self._seen is not None and self._seen.loaders.place(loader) is None:
            self._seen.loaders.add(loader, observed_loader(loader))
        self.begin()
        self._hear_passes()

    @guarded
    def stepped(self, optimizer: Optimizer, args: Args, kwargs: KeywordArgs) -> None:
        """An optimizer has stepped. A wrapper (Accelerate's) has the param groups of the one within, which is first."""
        if self._seen is None or get_ident() != self._thread:
            return
        self._steps_left -= 1
        self._hear_passes()
        if self._seen.optimizers.place(optimizer) is None:
            self._seen.optimizers.add(optimizer, observed_optimizer(optimizer))
            self.begin()
        self._seen.inputs.stepped(watching=self._undo_modules is not None)

    @guarded
    def backward(self, args: Args, kwargs: KeywordArgs) -> None:
        """A backward pass begins: whatever was called since the last one is trained."""
        if self._seen is None or self._undo_steps is None:
            return
        if min(self._steps_left, self._passes_left) <= 0 and self._undo_modules is None:
            self._rest()
            return
        self._passes_left -= 1
        if sys.modules["torch"].is_anomaly_enabled():
            self._seen.checks.add("anomaly")
        self._seen.inputs.backward()
        facts = self._seen.modules.facts
        for place in self._since_backward:
            facts[place] = replace(facts[place], trained=True)
        self._since_backward.clear()
        self._backward_seen += 1
        if self._backward_seen <= 2:
            self.look()

    def scaled(self, args: Args, kwargs: KeywordArgs) -> None:
        """A GradScaler is about to scale a loss."""
        if self._seen is not None and args[0].is_enabled():
            self._seen.grad_scaler = True

    def validated(self, args: Args, kwargs: KeywordArgs) -> None:
        """A distribution is made."""
        if self._seen is not None and args[0]._validate_args:
            self._seen.checks.add("validate_args")

    # -- modules -----------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Watch the next few outermost module calls."""
        if self._seen is None or self._times_left <= 0:
            return
        self._times_left -= 1
        self._calls_left = CALLS_AT_A_TIME
        if self._undo_modules is None and not _within_a_module():
            self._undo_modules = ExitStack()
            self._undo_modules.enter_context(around_outermost(Layer.INPUTS, self._called))

    def look_away(self) -> None:
        undo, self._undo_modules = self._undo_modules, None
        if undo is not None:
            undo.close()
            if self._seen is not None:
                self._seen.inputs.missed()

    def _called(self, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.hears:
            return call(args, kwargs)
        self.enters(module, args, kwargs)
        try:
            return call(args, kwargs)
        finally:
            self.leaves()

    @guarded
    def enters(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module is called."""
        import torch

        assert self._seen is not None
        self._hear_passes()
        modules = self._seen.modules
        place = modules.place(module)
        if place is None:
            place = modules.add(module, observed_module(module, trained=False, autocast_dtype=None))
        if place is None:
            return
        self.current = place
        self._note_autocast(_autocast_dtype(module))
        self._seen.tf32 = tf32_setting()
        if module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._since_backward.add(place)
            self._seen.inputs.called(args, kwargs)

    def leaves(self) -> None:
        self.current = None
        self._calls_left -= 1
        if self._calls_left <= 0:
            self.look_away()

    @guarded
    def autocasts(self, region: Any) -> None:
        """Autocast is switched, perhaps within the outermost module."""
        import torch

        if self.current is not None and torch.is_autocast_enabled(region.device):
            self._note_autocast(dtype_name(torch.get_autocast_dtype(region.device)))

    def _note_autocast(self, kind: str | None) -> None:
        if self._seen is not None and self.current is not None and kind is not None:
            facts = self._seen.modules.facts
            facts[self.current] = replace(facts[self.current], autocast_dtype=kind)


@contextmanager
def _autocast(watch: Watch) -> Iterator[None]:
    from torch.amp.autocast_mode import autocast

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __enter__(self: Any) -> Any:
            result = original(self)
            if watch.current is not None and watch.hears:
                watch.autocasts(self)
            return result

        return __enter__

    with replaced(autocast, "__enter__", wrap):
        yield


# -- settings and figures ----------------------------------------------------------------------------------------------


def tf32_setting() -> bool | None:
    """Whether torch lets matrix products use TF32; None where it will not tell (old and new switches mixed)."""
    import torch

    with suppress(RuntimeError, AttributeError):
        return bool(torch.backends.cuda.matmul.allow_tf32)
    with suppress(RuntimeError, AttributeError):
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
    return None


def attention_backend(counts: Counter[str]) -> str | None:
    """The back end of scaled_dot_product_attention that was called most; None where none was."""
    calls = Counter[str]()
    for name, backend in _ATTENTION.items():
        calls[backend] += counts[name]
    backend, count = calls.most_common(1)[0]
    return backend if count else None


def has_ampere_units(device: Device) -> bool:
    """TF32 and bf16: NVIDIA's Ampere (8.0) was the first with them; a GPU of unknown capability counts as one."""
    capability = str(device.details.get("compute_capability") or "8.0")
    return device.kind == "cuda" and int(capability.split(".")[0]) >= 8


def _autocast_dtype(module: Module) -> str | None:
    """The dtype of the autocast that is on, for the device of the module's parameters."""
    import torch

    first = next(module.parameters(), None)
    kinds = (first.device.type,) if first is not None else ("cuda", "cpu")
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return dtype_name(torch.get_autocast_dtype(on[0])) if on else None


def _within_a_module() -> bool:
    """Whether a module call is going on, of which nothing was noted."""
    from torch.nn import Module

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is Module._call_impl.__code__:
            return True
    return False


class ObservedInputs:
    """Shapes of what is called to be trained, per backward pass, of whole steps: from one optimizer step to the next.

    `whole` is whether everything was watched since the last optimizer step.
    """

    def __init__(self) -> None:
        self.steps: set[StepInputs] = set()
        self._passes: list[tuple[Shape, ...]] = []
        self._shapes: dict[Shape | None, None] = {}
        self._whole = True

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensor = next(_tensors(args, kwargs), None)
        self._shapes[None if tensor is None else tuple(tensor.shape)] = None

    def backward(self) -> None:
        """A backward pass begins, through the calls since the last one."""
        if not self._shapes or None in self._shapes:
            self._whole = False
        self._passes.append(tuple(shape for shape in self._shapes if shape is not None))
        self._shapes.clear()

    def stepped(self, *, watching: bool) -> None:
        """An optimizer has stepped. `watching`: calls are watched from now on."""
        if self._whole and self._passes:
            self.steps.add(tuple(self._passes))
        self._passes.clear()
        self._shapes.clear()
        self._whole = watching

    def missed(self) -> None:
        self._whole = False

    @property
    def of_a_step(self) -> StepInputs | None:
        """What every step that was watched had; None where they differ, or none could be watched."""
        return next(iter(self.steps)) if len(self.steps) == 1 else None


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Those given as such or by name. The elements of a list are each a sample or not: they tell no batch."""
    from torch import Tensor

    for given in (*args, *kwargs.values()):
        for value in given.values() if isinstance(given, Mapping) else (given,):
            if isinstance(value, Tensor):
                yield value
