"""Local SGD: each rank steps by itself, and every k steps the ranks take the mean of their weights.

Sources: Stich, "Local SGD Converges Fast and Communicates Little" (2019); PyTorch, `PeriodicModelAverager`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpulab.knobs.distributed.ddp_options import NO_DDP, data_parallel
from gpulab.knobs.knob import CodeEdit, Kind, Knob, KnobEffects, Value, Verification
from gpulab.knobs.observe.observation import Observation
from gpulab.run import Run
from gpulab.torch_hooks.optimizer_step import HookOrder, Watcher, around_steps
from gpulab.torch_hooks.patching import replaced

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

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
