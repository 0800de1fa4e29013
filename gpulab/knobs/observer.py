"""Observes what a cell uses while it runs as written, so that every knob knows its present value and its limits.

On the thread that enters, it hooks `DataLoader.__iter__`, `GradScaler.scale` and `autocast.__enter__`. For a few steps
at a time it also hooks optimizer steps, backward passes and a few outermost module calls: at the beginning, and again
when a loader is iterated or an optimizer steps for the first time. Module calls are also sampled after the first
backward passes. All hooks are removed. References to objects are weak and dropped when the code ends.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from msgspec.structs import replace

from gpulab.knobs.description import WeakTable, dtype_name, observed_loader, observed_module, observed_optimizer
from gpulab.knobs.observation import OPERATORS, Observation, Shape, StepInputs, trace_counts
from gpulab.patching.attributes import Args, Hook, KeywordArgs, before_calls, replaced
from gpulab.patching.hook_points import Call, Layer, around_outermost, step_hooks
from gpulab.run import Device, Run
from gpulab.timeline.labels import differentiates_twice

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

CALLS_OF_A_SAMPLE = 16  # outermost module calls
SAMPLES = 12  # of such calls, at most
STEPS_AT_A_TIME, PASSES_AT_A_TIME = 5, 512  # optimizer steps; backward passes, if there is no optimizer step
MOST_OBJECTS = 32  # of each kind

_WORKER_DIED = "DataLoader worker"  # torch's signal handler raises this at any line of the main thread
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math",
}

Facts = TypeVar("Facts")
Parameters = ParamSpec("Parameters")


class FactsByObject(Generic[Facts]):
    """Facts of objects in the order of their first use, with weak references to the objects until `forget`."""

    def __init__(self, describe: Callable[[Any], Facts]) -> None:
        self.facts: list[Facts] = []
        self._describe = describe
        self._places: WeakTable[int] = WeakTable()

    def place(self, thing: object) -> int | None:
        """The position of the object's facts, read at its first use; None if there are too many objects."""
        place = self._places.get(thing)
        if place is None and len(self.facts) < MOST_OBJECTS:
            self.facts.append(self._describe(thing))
            place = len(self.facts) - 1
            self._places.put(thing, place)
        return place

    def forget(self) -> None:
        self._places.clear()


def guarded(note: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Suppress faults of gpulab, which must not reach the user: an object that cannot be described is not recorded."""

    @functools.wraps(note)
    def careful(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            note(*args, **kwargs)
        except Exception as e:
            if str(e).startswith(_WORKER_DIED):
                raise

    return careful


class Observer:
    """Records facts of the code inside `observing`, on the thread that created the observer.

    `observation` joins the facts with the record of the same run.
    """

    def __init__(self, samples: int = SAMPLES) -> None:
        self.loaders = FactsByObject(observed_loader)
        self.optimizers = FactsByObject(observed_optimizer)
        self.modules = FactsByObject(observed_module)
        self._tf32: bool | None = None  # torch's setting while modules were called; None: unknown
        self._grad_scaler = False
        self._checks: set[str] = set()
        self._checkpoints = False
        self.inputs = InputShapes()
        self._thread = get_ident()
        self._closed = False
        self._sample_budget, self._call_budget = samples, 0
        self._step_budget = self._pass_budget = 0
        self._steps = Hook(lambda: step_hooks(self._optimizer_step))
        self._passes = Hook(lambda: before_calls(import_module("torch.autograd"), "backward", self._backward))
        self._calls = Hook(lambda: around_outermost(Layer.INPUTS, self._around_module))
        self._since_backward: set[int] = set()  # positions of modules called with gradients
        self._pass_count = 0
        self._current: int | None = None  # position of the running outermost module, if sampled

    def observation(self, run: Run) -> Observation:
        """The observation of `run`, the run that was observed."""
        counts = Counter(trace_counts(run, OPERATORS) or {})
        return Observation(
            device=run.device,
            loaders=tuple(sorted(self.loaders.facts, key=lambda one: one.record != run.loader)),
            optimizers=tuple(self.optimizers.facts),
            modules=tuple(sorted(self.modules.facts, key=lambda one: (not one.trained, -one.parameter_count))),
            operators=frozenset(counts),
            tf32=self._tf32 if has_ampere_units(run.device) else None,
            attention=attention_backend(counts),
            compute_threads=run.environment.compute_threads,
            grad_scaler=self._grad_scaler,
            differentiates_twice=differentiates_twice(run),
            checks=frozenset(self._checks),
            checkpoints=self._checkpoints,
            step_inputs=self.inputs.of_a_step,
        )

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record what the code inside uses. Imports torch."""
        from torch.amp import GradScaler
        from torch.amp.autocast_mode import autocast
        from torch.distributions import Distribution
        from torch.utils import checkpoint
        from torch.utils.data import DataLoader

        with ExitStack() as undo:
            undo.callback(self._close)
            undo.enter_context(before_calls(DataLoader, "__iter__", self._loader))
            undo.enter_context(before_calls(GradScaler, "scale", self._grad_scaler_scale))
            undo.enter_context(before_calls(Distribution, "__init__", self._distribution))
            undo.enter_context(before_calls(checkpoint, "_checkpoint_without_reentrant_generator", self._checkpoint))
            undo.enter_context(replaced(autocast, "__enter__", self._around_autocast))
            self._begin()
            yield

    def _close(self) -> None:
        """The code has ended: remove the hooks and forget the objects."""
        self._end_sample()
        self._rest()
        self._closed = True
        for hook in (self._steps, self._passes, self._calls):
            hook.close()
        if self._tf32 is None:
            self._tf32 = tf32_setting()
        for facts in (self.loaders, self.optimizers, self.modules):
            facts.forget()

    # -- loaders, optimizers, gradients ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Observe the next few steps, and sample the first module calls of them."""
        self._step_budget, self._pass_budget = STEPS_AT_A_TIME, PASSES_AT_A_TIME
        self._steps.on()
        self._sample()

    def _observe_passes(self) -> None:
        """Observe backward passes too. Installed while the code runs, so it is outermost and can be removed."""
        if self._steps.is_on:
            self._passes.on()

    def _rest(self) -> None:
        """Remove the hooks of steps. Must not run inside an optimizer's hook, while torch iterates over the hooks."""
        if self._steps.is_on:
            self._passes.off()
            self._steps.off()
            self.inputs.whole = False

    @guarded
    def _loader(self, args: Args, kwargs: KeywordArgs) -> None:
        """The code asks a DataLoader for an iterator."""
        if not self._closed:
            self.loaders.place(args[0])
        self._begin()
        self._observe_passes()

    @guarded
    def _optimizer_step(self, optimizer: Optimizer, args: Args, kwargs: KeywordArgs) -> None:
        """An optimizer has stepped. A wrapper that shares its param groups (Accelerate's) steps after it."""
        if self._closed or get_ident() != self._thread:
            return
        self._step_budget -= 1
        self._observe_passes()
        count = len(self.optimizers.facts)
        self.optimizers.place(optimizer)
        if len(self.optimizers.facts) > count:
            self._begin()
        self.inputs.stepped(sampling=self._calls.is_on)

    @guarded
    def _backward(self, args: Args, kwargs: KeywordArgs) -> None:
        """A backward pass begins: the modules called since the last one are trained."""
        if not self._steps.is_on:
            return
        if min(self._step_budget, self._pass_budget) <= 0 and not self._calls.is_on:
            self._rest()
            return
        self._pass_budget -= 1
        if sys.modules["torch"].is_anomaly_enabled():
            self._checks.add("anomaly")
        self.inputs.backward()
        facts = self.modules.facts
        for place in self._since_backward:
            facts[place] = replace(facts[place], trained=True)
        self._since_backward.clear()
        self._pass_count += 1
        if self._pass_count <= 2:
            self._sample()

    def _grad_scaler_scale(self, args: Args, kwargs: KeywordArgs) -> None:
        """A GradScaler scales a loss."""
        self._grad_scaler |= args[0].is_enabled()

    def _distribution(self, args: Args, kwargs: KeywordArgs) -> None:
        if args[0]._validate_args:
            self._checks.add("validate_args")

    def _checkpoint(self, args: Args, kwargs: KeywordArgs) -> None:
        """Activations of a call are not kept."""
        self._checkpoints = True

    # -- modules -----------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Observe the next few outermost module calls."""
        if self._closed or self._sample_budget <= 0:
            return
        self._sample_budget -= 1
        self._call_budget = CALLS_OF_A_SAMPLE
        if not (self._calls.is_on or _within_a_module()):
            self._calls.on()

    def _end_sample(self) -> None:
        if self._calls.is_on:
            self._calls.off()
            self.inputs.whole = False

    def _around_module(self, module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._closed:
            return call(args, kwargs)
        self._module_call(module, args, kwargs)
        try:
            return call(args, kwargs)
        finally:
            self._current = None
            self._call_budget -= 1
            if self._call_budget <= 0:
                self._end_sample()

    @guarded
    def _module_call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An outermost module is called."""
        import torch

        self._observe_passes()
        self._current = place = self.modules.place(module)
        if place is None:
            return
        self._note_autocast(_autocast_dtype(module))
        self._tf32 = tf32_setting()
        if module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self._since_backward.add(place)
            self.inputs.called(args, kwargs)

    def _around_autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `autocast.__enter__`, which may be called inside the outermost module."""

        @guarded
        def note(region: Any) -> None:
            import torch

            if torch.is_autocast_enabled(region.device):
                self._note_autocast(dtype_name(torch.get_autocast_dtype(region.device)))

        @functools.wraps(original)
        def __enter__(region: Any) -> Any:
            result = original(region)
            if self._current is not None and not self._closed and get_ident() == self._thread:
                note(region)
            return result

        return __enter__

    def _note_autocast(self, kind: str | None) -> None:
        if self._current is not None and kind is not None:
            facts = self.modules.facts
            facts[self._current] = replace(facts[self._current], autocast_dtype=kind)


@contextmanager
def observe(samples: int = SAMPLES) -> Iterator[Observer]:
    """Record what the code inside uses; `samples`: how often a few outermost module calls are sampled."""
    observer = Observer(samples)
    with observer.observing():
        yield observer


# -- settings and figures ----------------------------------------------------------------------------------------------


def tf32_setting() -> bool | None:
    """Whether torch lets matrix products use TF32; None if the query raises (old and new switches mixed)."""
    import torch

    with suppress(RuntimeError, AttributeError):
        return bool(torch.backends.cuda.matmul.allow_tf32)
    with suppress(RuntimeError, AttributeError):
        return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"
    return None


def attention_backend(counts: Counter[str]) -> str | None:
    """The most frequent back end of scaled_dot_product_attention; None without any."""
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
    """The dtype of the active autocast for the device of the module's parameters."""
    import torch

    first = next(module.parameters(), None)
    kinds = (first.device.type,) if first is not None else ("cuda", "cpu")
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    return dtype_name(torch.get_autocast_dtype(on[0])) if on else None


def _within_a_module() -> bool:
    """Whether this thread is inside a module call already."""
    from torch.nn import Module

    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is Module._call_impl.__code__:
            return True
    return False


class InputShapes:
    """Shapes of the inputs of trained modules, per backward pass, in whole steps: from one optimizer step to the next.

    `whole`: whether all module calls since the last optimizer step were observed.
    """

    def __init__(self) -> None:
        self.whole = True
        self._steps: set[StepInputs] = set()
        self._passes: list[tuple[Shape, ...]] = []
        self._shapes: dict[Shape | None, None] = {}

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensor = next(_tensors(args, kwargs), None)
        self._shapes[None if tensor is None else tuple(tensor.shape)] = None

    def backward(self) -> None:
        """A backward pass begins: it trains the modules called since the last one."""
        if not self._shapes or None in self._shapes:
            self.whole = False
        self._passes.append(tuple(shape for shape in self._shapes if shape is not None))
        self._shapes.clear()

    def stepped(self, *, sampling: bool) -> None:
        """An optimizer has stepped. `sampling`: module calls are observed from now on."""
        if self.whole and self._passes:
            self._steps.add(tuple(self._passes))
        self._passes.clear()
        self._shapes.clear()
        self.whole = sampling

    @property
    def of_a_step(self) -> StepInputs | None:
        """The inputs common to all observed steps; None if steps differ, or none was observed."""
        return next(iter(self._steps)) if len(self._steps) == 1 else None


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Tensors among the arguments, also in a mapping. Lists are skipped: an element may be a sample, not a batch."""
    from torch import Tensor

    for argument in (*args, *kwargs.values()):
        for value in argument.values() if isinstance(argument, Mapping) else (argument,):
            if isinstance(value, Tensor):
                yield value
