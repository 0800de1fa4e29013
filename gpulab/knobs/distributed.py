"""Knobs for several ranks: what DistributedDataParallel and FSDP2 send, when, and in how many pieces.

Sources: PyTorch, "DDP Communication Hooks", `PeriodicModelAverager` and "torch.distributed.fsdp.fully_shard";
Stich, "Local SGD Converges Fast and Communicates Little" (2019).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpulab.errors import UsageError
from gpulab.formatting import plural
from gpulab.knobs.description import observed_data_parallel
from gpulab.knobs.knob import CodeEdit, Knob, KnobEffects, Value, Verification, as_number, took_effect
from gpulab.knobs.observation import Observation, ObservedDataParallel
from gpulab.patching.attributes import Args, KeywordArgs, before_calls, replaced
from gpulab.patching.hook_points import Call, HookOrder, Layer, OptimizerHook, around_outermost, around_steps
from gpulab.run import Run

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

NO_DDP = "no DistributedDataParallel is called in your code"
NONE_WRAPPED = "the code created no DistributedDataParallel while it ran; one created earlier keeps its options"
NONE_SHARDED = "no module under fully_shard is called in your code"
HAS_ONE = "the model already has a communication hook, and takes only one"
GLOO_WAITS = (
    "PyTorch's PowerSGD blocks gloo's own threads, and deadlocks with more than one bucket: "
    "use NCCL, or a bucket_cap_mb larger than all gradients together"
)
LEAST_MB = 0.01
START_STEPS = 2  # PowerSGD needs at least two steps of full gradients; its default of 1000 would outlast a block

# Names of counts
WRAPPED, HOOKED, SHARDED = "wrapped models", "models with the hook", "sharded modules"
AVERAGED, LOCAL = "averages", "local steps"


def data_parallel(observation: Observation) -> ObservedDataParallel | None:
    """The model whose gradients are exchanged; None if there is none."""
    return next((m.data_parallel for m in observation.modules if m.data_parallel is not None), None)


class RankKnob(Knob):
    """A knob for a model under DistributedDataParallel; it has no effect in a single process."""

    of_ranks = True
    kind = "module call"

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if data_parallel(observation) is not None else NO_DDP


# -- arguments of DistributedDataParallel ------------------------------------------------------------------------------


class DdpOption(RankKnob):
    """An argument of DistributedDataParallel, named as the knob, as if the code passed it to the constructor."""

    change_counts = (WRAPPED,)
    idle_text = NONE_WRAPPED

    def value_in(self, observation: Observation) -> Value | None:
        ddp = data_parallel(observation)
        return None if ddp is None else getattr(ddp, self.name)

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
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
                bound.arguments[name] = value
                effects.count(WRAPPED)
                original(*bound.args, **bound.kwargs)

            return __init__

        name = self.name
        undo.enter_context(replaced(DistributedDataParallel, "__init__", wrap))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        count = effects.counts[WRAPPED]
        words = f"{count} DistributedDataParallel {'was' if count == 1 else 'were'} created with {self.name}={value}"
        return took_effect(words)

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        line = f"model = DistributedDataParallel(model, {self.name}={value})"
        return CodeEdit(line, "DistributedDataParallel", self.name, str(value))


class BucketCap(DdpOption):
    """The size of a bucket: how many gradients are collected before an exchange."""

    name = "bucket_cap_mb"
    title = "DDP bucket size"
    help = "MB of gradients per all-reduce: larger buckets mean fewer all-reduces, smaller ones start sooner"
    options = (1, 5, 25, 100)
    climb_values = (100, 5)
    aliases = ("bucket", "bucket_size", "bucket_cap")
    helps_against = {"exposed_communication": 1, "small_collectives": 1}

    def parse(self, raw: object) -> Value:
        """A number of MB, also a fraction. Raises UsageError."""
        number = as_number(raw)
        if number < LEAST_MB:
            least = f"a number of MB ≥ {LEAST_MB}"
            raise UsageError(f"{self.name} must be {least}, got {str(raw)!r}. PyTorch's default is {self.name}=25.")
        return int(number) if number.is_integer() else number


class BucketView(DdpOption):
    """Gradients as views of the buckets, which saves one copy."""

    name = "gradient_as_bucket_view"
    title = "Gradients as bucket views"
    help = "Avoids a copy of all gradients: saves memory and time"
    options = (False, True)
    aliases = ("bucket_view",)
    helps_against = {"exposed_communication": 3}


class StaticGraph(DdpOption):
    """Promises that the same parameters get gradients in each step, so that DDP need not search for unused ones."""

    name = "static_graph"
    title = "DDP static graph"
    help = "DDP records the used parameters in the first step and skips the search afterwards"
    options = (False, True)

    def cautions(self, observation: Observation, value: Value) -> tuple[str, ...]:
        return ("if a later step uses other parameters, their gradients are wrong",) if value else ()


# -- communication hooks ----------------------------------------------------------------------------------------


class CommHook(RankKnob):
    """The hook that exchanges a bucket of gradients instead of DistributedDataParallel's own all-reduce."""

    name = "comm_hook"
    title = "Compressed gradients"
    help = "Exchanges gradients in 16 bits, or as low-rank factors (PowerSGD): fewer bytes over a slow link"
    options = ("none", "fp16", "bf16", "powersgd")
    climb_values = ("fp16",)
    changes_training = "the ranks exchange rounded gradients"
    aliases = ("compression", "gradient_compression", "compress")
    change_counts = (HOOKED,)
    idle_text = "no communication hook was registered"
    helps_against = {"exposed_communication": 2}

    def value_in(self, observation: Observation) -> Value | None:
        ddp = data_parallel(observation)
        return None if ddp is None or ddp.has_hook else "none"

    def refuses(self, observation: Observation, value: Value) -> str | None:
        ddp = data_parallel(observation)
        return NO_DDP if ddp is None else _takes_no_hook(ddp, value)

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        """Register at a model's first call: by then the user's code has registered its own hook."""
        from torch.nn.parallel import DistributedDataParallel

        models: weakref.WeakSet[Any] = weakref.WeakSet()

        def called(args: Args, kwargs: KeywordArgs) -> None:
            if args[0] not in models:
                models.add(args[0])
                _register(args[0], str(value), effects)

        if value != "none":
            undo.enter_context(before_calls(DistributedDataParallel, "forward", called))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        return took_effect(f"{effects.counts[HOOKED]} DistributedDataParallel exchanged gradients with {value}")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        if value == "none":
            return CodeEdit("# leave model.register_comm_hook(…) out")
        module, state, hook = "default_hooks", "None", f"default_hooks.{value}_compress_hook"
        lines = []
        if value == "powersgd":
            module, state, hook = "powerSGD_hook", "state", "powerSGD_hook.powerSGD_hook"
            arguments = "None, matrix_approximation_rank=1, start_powerSGD_iter=1000"
            lines = [f"state = powerSGD_hook.PowerSGDState({arguments})"]
        return CodeEdit(
            "\n".join(
                [
                    f"from torch.distributed.algorithms.ddp_comm_hooks import {module}",
                    *lines,
                    f"model.register_comm_hook({state}, {hook})  # once, after DistributedDataParallel(…)",
                ]
            )
        )


def _takes_no_hook(model: ObservedDataParallel, value: Value) -> str | None:
    """Why a model cannot take this hook; None if it can."""
    if model.has_hook:
        return HAS_ONE
    return GLOO_WAITS if value == "powersgd" and model.backend == "gloo" and model.bucket_count > 1 else None


def _register(model: Any, name: str, effects: KnobEffects) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    ddp = observed_data_parallel(model)
    if ddp is not None and (why := _takes_no_hook(ddp, name)):
        effects.refuse(why)
        return
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


# -- weights instead of gradients --------------------------------------------------------------------------------------


class LocalSgd(RankKnob):
    """Ranks step without exchanging gradients; every k steps they average their weights."""

    name = "local_sgd"
    title = "Local SGD"
    help = "Steps between weight averages across ranks, instead of a gradient all-reduce in every step"
    options = (1, 2, 4, 8, 16)
    climb_values = (8,)
    changes_training = "the ranks' weights diverge between averages"
    aliases = ("localsgd", "periodic_averaging")
    change_counts = (LOCAL,)
    idle_text = "gradients were all-reduced in every step"
    helps_against = {"exposed_communication": 4, "straggler": 2}

    def value_in(self, observation: Observation) -> Value | None:
        return 1 if data_parallel(observation) is not None else None

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if value == 1 else super().refuses(observation, value)

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        if int(value) > 1:
            averaging = Averaging(int(value), effects)
            undo.enter_context(without_sync(averaging.models))
            undo.enter_context(around_steps(HookOrder.OPTIONS, averaging))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        local, averages = effects.counts[LOCAL], effects.counts[AVERAGED]
        return took_effect(f"{local} steps without an all-reduce, {averages} weight averages")

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


class Averaging(OptimizerHook):
    """Averages the weights of its models after every k-th step."""

    def __init__(self, period: int, effects: KnobEffects) -> None:
        self._period = period
        self._effects = effects
        self.models: list[Any] = []
        self._steps: dict[int, int] = {}  # by position of the model

    def after(self, optimizer: Optimizer) -> None:
        """Count a step of a model's weights."""
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


@contextmanager
def without_sync(models: list[Any]) -> Iterator[None]:
    """Inside, each DistributedDataParallel called on this thread runs under its `no_sync` and is added to `models`.

    For knobs that exchange gradients later.
    """
    import torch.distributed

    if not torch.distributed.is_available():
        yield
        return
    from torch.nn.parallel import DistributedDataParallel

    def called(args: Args, kwargs: KeywordArgs) -> None:
        if not any(args[0] is other for other in models):
            models.append(args[0])
        args[0].require_backward_grad_sync = False

    try:
        with before_calls(DistributedDataParallel, "forward", called):
            yield
    finally:
        for model in models:
            model.require_backward_grad_sync = True
            model.require_forward_param_sync = True


def average(tensors: Sequence[Tensor], group: Any) -> None:
    """Replace each tensor by its mean over all ranks, with one collective per dtype."""
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


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class ReshardAfterForward(RankKnob):
    """Whether modules under `fully_shard` free gathered weights; if not, the backward pass need not gather again."""

    name = "reshard_after_forward"
    title = "FSDP: reshard after the forward pass"
    help = "Off: one all-gather of the weights per step instead of two, at the cost of keeping all of them in memory"
    options = (False, True)
    climb_values = (False,)
    cost = "Off keeps all weights in memory on each rank between forward and backward."
    aliases = ("reshard",)
    change_counts = (SHARDED,)
    idle_text = NONE_SHARDED

    def value_in(self, observation: Observation) -> Value | None:
        return None  # PyTorch does not expose it

    def refuses(self, observation: Observation, value: Value) -> str | None:
        return None if any(m.fully_sharded for m in observation.modules) else NONE_SHARDED

    def apply(self, value: Value, effects: KnobEffects, undo: ExitStack) -> None:
        from torch.distributed.fsdp import FSDPModule

        modules: dict[int, Any] = {}

        def around(module: Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if id(module) not in modules:
                modules[id(module)] = module
                for part in module.modules():
                    if isinstance(part, FSDPModule):
                        part.set_reshard_after_forward(bool(value), recurse=False)
                        effects.count(SHARDED)
            return call(args, kwargs)

        undo.enter_context(around_outermost(Layer.INPUTS, around))

    def evidence(self, observation: Observation, value: Value, effects: KnobEffects, run: Run) -> Verification:
        does = "freed" if value else "kept"
        return took_effect(f"{plural(effects.counts[SHARDED], 'module')} {does} weights after the forward pass")

    def code_edit(self, observation: Observation, value: Value) -> CodeEdit:
        line = f"fully_shard(module, reshard_after_forward={value})"
        return CodeEdit(line, "fully_shard", self.name, str(value))


BUCKET_CAP_MB, GRADIENT_AS_BUCKET_VIEW, STATIC_GRAPH = BucketCap(), BucketView(), StaticGraph()
COMM_HOOK, LOCAL_SGD, RESHARD_AFTER_FORWARD = CommHook(), LocalSgd(), ReshardAfterForward()
