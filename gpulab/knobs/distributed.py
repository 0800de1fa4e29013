"""Knobs of several ranks: what DistributedDataParallel and FSDP2 send, when, and in how many pieces.

Sources: PyTorch, "DDP Communication Hooks", `PeriodicModelAverager` and "torch.distributed.fsdp.fully_shard";
Stich, "Local SGD Converges Fast and Communicates Little" (2019).
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpulab.errors import UsageError
from gpulab.formatting import plural
from gpulab.knobs.description import observed_data_parallel
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observation import Observation, ObservedDataParallel
from gpulab.run import Run
from gpulab.torch_hooks.hook_points import Call, HookOrder, Layer, Watcher, around_outermost, around_steps
from gpulab.torch_hooks.patching import replaced

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

WRAPPED = "wrapped models"
NO_DDP = "no DistributedDataParallel is called in your code"
NONE_WRAPPED = "the code created no DistributedDataParallel while it ran; one created earlier keeps its options"
LEAST_MB = 0.01


def data_parallel(observation: Observation) -> ObservedDataParallel | None:
    """The model whose gradients are exchanged; None where there is none."""
    return next((m.data_parallel for m in observation.modules if m.data_parallel is not None), None)


class DdpOption(Knob):
    """An argument of DistributedDataParallel of the knob's own name."""

    of_ranks = True
    kind: Kind = "module call"

    def value_in(self, observation: Observation) -> Value | None:
        seen = data_parallel(observation)
        return None if seen is None else getattr(seen, self.name)

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if data_parallel(observation) is not None else NO_DDP

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        effects = KnobEffects()

        def change(arguments: dict[str, Any]) -> None:
            arguments[self.name] = value
            effects.count(WRAPPED)

        with arguments_changed(change):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts.get(WRAPPED, 0)
        if not count:
            return Verification("no effect", NONE_WRAPPED)
        words = f"{count} DistributedDataParallel {'was' if count == 1 else 'were'} created with {self.name}={value}"
        return Verification("took effect", words)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        line = f"model = DistributedDataParallel(model, {self.name}={value})"
        return CodeEdit(line, "DistributedDataParallel", self.name, str(value))


def arguments_changed(change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Inside, each DistributedDataParallel that this thread makes has the arguments that `change` leaves it."""
    from torch.nn.parallel import DistributedDataParallel

    thread = get_ident()

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if get_ident() != thread:
                original(self, *args, **kwargs)
                return
            bound = signature.bind(self, *args, **kwargs)
            change(bound.arguments)
            original(*bound.args, **bound.kwargs)

        return __init__

    return replaced(DistributedDataParallel, "__init__", wrap)


class BucketCap(DdpOption):
    """How many gradients are gathered before they are exchanged."""

    name = "bucket_cap_mb"
    title = "DDP bucket size"
    help = "MB of gradients per all-reduce: larger buckets mean fewer all-reduces, smaller ones start sooner"
    options: tuple[Value, ...] = (1, 5, 25, 100)
    climb_values = (100, 5)
    aliases = ("bucket", "bucket_size", "bucket_cap")
    helps_against: Mapping[str, int] = {"exposed_communication": 1, "small_collectives": 1}

    def parse(self, text: str) -> Value:
        """A number of MB, of which a part may be. Raises UsageError."""
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not LEAST_MB <= number < math.inf:
            raise UsageError(
                f"{self.name} must be a number of MB ≥ {LEAST_MB}, got {text!r}. PyTorch's default is {self.name}=25."
            )
        return int(number) if number.is_integer() else number


class BucketView(DdpOption):
    """Gradients that lie in the buckets: one copy less."""

    name = "gradient_as_bucket_view"
    title = "Gradients as bucket views"
    help = "Avoids a copy of all gradients: saves memory and time"
    options: tuple[Value, ...] = (False, True)
    aliases = ("bucket_view",)
    helps_against: Mapping[str, int] = {"exposed_communication": 3}


class StaticGraph(DdpOption):
    """The same parameters get gradients in each step, and DDP need not find out which."""

    name = "static_graph"
    title = "DDP static graph"
    help = "DDP records the used parameters in the first step and skips the search afterwards"
    options: tuple[Value, ...] = (False, True)

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        return ("if a later step uses other parameters, their gradients are wrong",) if value else ()


BUCKET_CAP_MB, GRADIENT_AS_BUCKET_VIEW, STATIC_GRAPH = BucketCap(), BucketView(), StaticGraph()


HOOKED = "models with the hook"
HAS_ONE = "the model already has a communication hook, and takes only one"
GLOO_WAITS = (
    "PyTorch's PowerSGD blocks gloo's own threads, and deadlocks with more than one bucket: "
    "use NCCL, or a bucket_cap_mb larger than all gradients together"
)
START_STEPS = 2  # PowerSGD needs two steps of whole gradients first; its own default of 1000 would outlast a block

_EDITS = {
    "fp16": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # once, after DistributedDataParallel(…)",
    "bf16": "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # once, after DistributedDataParallel(…)",
    "powersgd": "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook\n"
    "state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=1000)\n"
    "model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # once, after DistributedDataParallel(…)",
}


class CommHook(Knob):
    """The hook that exchanges a bucket of gradients in place of DistributedDataParallel's own all-reduce."""

    name = "comm_hook"
    title = "Compressed gradients"
    help = "Exchanges gradients in 16 bits, or as low-rank factors (PowerSGD): fewer bytes over a slow link"
    kind: Kind = "module call"
    of_ranks = True
    options: tuple[Value, ...] = ("none", "fp16", "bf16", "powersgd")
    climb_values = ("fp16",)
    changes_training = "the ranks exchange rounded gradients"
    aliases = ("compression", "gradient_compression", "compress")
    helps_against: Mapping[str, int] = {"exposed_communication": 2}

    def value_in(self, observation: Observation) -> Value | None:
        seen = data_parallel(observation)
        return None if seen is None or seen.has_hook else "none"

    def refuses(self, observation: Observation, value: Value) -> str | None:
        seen = data_parallel(observation)
        if seen is None:
            return NO_DDP
        if seen.has_hook:
            return HAS_ONE
        return GLOO_WAITS if value == "powersgd" and seen.backend == "gloo" and seen.bucket_count > 1 else None

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        effects = KnobEffects()
        if value == "none":
            yield effects
            return
        from torch.nn.parallel import DistributedDataParallel

        thread = get_ident()
        met: weakref.WeakSet[Any] = weakref.WeakSet()

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                if get_ident() == thread and self not in met:  # by now the user's code has registered its own
                    met.add(self)
                    _register(self, str(value), effects)
                return original(self, *args, **kwargs)

            return forward

        with replaced(DistributedDataParallel, "forward", wrap):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts.get(HOOKED, 0)
        if value == "none" and not effects.refused:
            return Verification("took effect", "no hook was registered")
        if not count:
            return Verification("no effect", "; ".join(effects.refused) or NO_DDP)
        return Verification("took effect", f"{count} DistributedDataParallel exchanged gradients with {value}")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        return CodeEdit(_EDITS.get(str(value), "# leave model.register_comm_hook(…) out"))


def _register(model: Any, name: str, effects: KnobEffects) -> None:
    if getattr(model, "_comm_hooks", None):
        effects.refuse(HAS_ONE)
        return
    seen = observed_data_parallel(model)
    if name == "powersgd" and seen is not None and seen.backend == "gloo" and seen.bucket_count > 1:
        effects.refuse(GLOO_WAITS)
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    try:
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=START_STEPS)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    except (RuntimeError, ValueError, TypeError) as e:  # bf16 needs NCCL 2.9.7 and CUDA 11
        effects.refuse(f"PyTorch rejected the hook: {e}")
        return
    effects.count(HOOKED)


COMM_HOOK = CommHook()


AVERAGED, LOCAL = "averages", "local steps"


class LocalSgd(Knob):
    """No gradient is exchanged; the weights are, every k-th step."""

    name = "local_sgd"
    title = "Local SGD"
    help = "Steps between weight averages across ranks, instead of a gradient all-reduce in every step"
    kind: Kind = "module call"
    of_ranks = True
    options: tuple[Value, ...] = (1, 2, 4, 8, 16)
    climb_values = (8,)
    changes_training = "the ranks' weights diverge between averages"
    aliases = ("localsgd", "periodic_averaging")
    helps_against: Mapping[str, int] = {"exposed_communication": 4, "straggler": 2}

    def value_in(self, observation: Observation) -> Value | None:
        return 1 if data_parallel(observation) is not None else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if value == 1 or data_parallel(observation) is not None else NO_DDP

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        effects = KnobEffects()
        if int(value) == 1:
            yield effects
            return
        averaging = Averaging(int(value), effects)
        with kept_local(averaging.models), around_steps(HookOrder.OPTIONS, averaging):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        local, averages = effects.counts.get(LOCAL, 0), effects.counts.get(AVERAGED, 0)
        if value == 1:
            return Verification("took effect", "gradients were all-reduced in every step")
        if not local:
            return Verification("no effect", "; ".join(effects.refused) or NO_DDP)
        return Verification("took effect", f"{local} steps without an all-reduce, {averages} weight averages")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == 1:
            return CodeEdit("# remove no_sync() and the averager")
        return CodeEdit(
            "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
            f"averager = PeriodicModelAverager(period={value})\n"
            "with model.no_sync():  # each step: the forward and the backward pass\n"
            "    loss = …\n"
            "    loss.backward()\n"
            "optimizer.step()\n"
            "averager.average_parameters(model.parameters())"
        )


class Averaging(Watcher):
    """Averages the weights of its models after every k-th step."""

    def __init__(self, period: int, effects: KnobEffects) -> None:
        self._period = period
        self._effects = effects
        self.models: list[Any] = []
        self._steps: dict[int, int] = {}  # by the model's place

    def after(self, optimizer: Optimizer) -> None:
        """A step of some model's weights."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for place, model in enumerate(self.models):
            weights = [p for p in model.parameters() if p.requires_grad]
            if not any(id(p) in own for p in weights):
                continue
            self._effects.count(LOCAL)
            self._steps[place] = self._steps.get(place, 0) + 1
            if self._steps[place] % self._period == 0:
                average(weights, model.process_group)
                self._effects.count(AVERAGED)


LOCAL_SGD = LocalSgd()


# Keeps DistributedDataParallel from exchanging gradients, as its `no_sync` does: for knobs that exchange later.


@contextmanager
def kept_local(models: list[Any]) -> Iterator[None]:
    """Each DistributedDataParallel that this thread calls behaves as within its `no_sync`, and is in `models`."""
    import torch.distributed

    if not torch.distributed.is_available():
        yield
        return
    from torch.nn.parallel import DistributedDataParallel

    thread = get_ident()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                if not any(model is other for other in models):
                    models.append(model)
                model.require_backward_grad_sync = False
            return original(model, *args, **kwargs)

        return forward

    try:
        with replaced(DistributedDataParallel, "forward", wrap):
            yield
    finally:
        for model in models:
            model.require_backward_grad_sync = True
            model.require_forward_param_sync = True


def average(tensors: Sequence[Tensor], group: Any) -> None:
    """Give each tensor its mean over all ranks, in one collective for each kind of number."""
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    with torch.no_grad():
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            own = [t for t in tensors if t.dtype == dtype]
            flat = _flatten_dense_tensors(own)  # type: ignore[no-untyped-call]
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
            for tensor, mean in zip(own, _unflatten_dense_tensors(flat, own), strict=True):  # type: ignore[no-untyped-call]
                tensor.copy_(mean)


SET = "sharded modules"
NONE_SHARDED = "no module under fully_shard is called in your code"


class ReshardAfterForward(Knob):
    """Kept, the weights are not gathered a second time for the backward pass."""

    name = "reshard_after_forward"
    title = "FSDP: reshard after the forward pass"
    help = "Off: one all-gather of the weights per step instead of two, at the cost of keeping all of them in memory"
    kind: Kind = "module call"
    of_ranks = True
    options: tuple[Value, ...] = (False, True)
    climb_values = (False,)
    cost = "Off keeps all weights in memory on each rank between forward and backward."
    aliases = ("reshard",)

    def value_in(self, observation: Observation) -> Value | None:
        return None  # PyTorch does not tell

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if any(m.fully_sharded for m in observation.modules) else NONE_SHARDED

    @contextmanager
    def applied(self, value: Value) -> Iterator[KnobEffects]:
        from torch.distributed.fsdp import FSDPModule

        effects = KnobEffects()
        met: dict[int, Any] = {}

        def around(module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if id(module) not in met:
                met[id(module)] = module
                for part in module.modules():
                    if isinstance(part, FSDPModule):
                        part.set_reshard_after_forward(bool(value), recurse=False)
                        effects.count(SET)
            return call(args, kwargs)

        with around_outermost(Layer.INPUTS, around):
            yield effects

    def verify(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts.get(SET, 0)
        if not count:
            return Verification("no effect", NONE_SHARDED)
        does = "freed" if value else "kept"
        return Verification("took effect", f"{plural(count, 'module')} {does} weights after the forward pass")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        line = f"fully_shard(module, reshard_after_forward={value})"
        return CodeEdit(line, "fully_shard", self.name, str(value))


RESHARD_AFTER_FORWARD = ReshardAfterForward()
