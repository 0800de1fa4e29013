"""Run by torchrun: what each knob of ranks does to a training of two ranks, against the same written by hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.distributed import (
    BUCKET_CAP_MB,
    COMM_HOOK,
    GRADIENT_AS_BUCKET_VIEW,
    LOCAL_SGD,
    RESHARD_AFTER_FORWARD,
    STATIC_GRAPH,
)
from gpulab.knobs.knob import Knob, KnobEffects, Value

STEPS = 8


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def batches() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(8, 16, generator=numbers) for _ in range(STEPS)]


def train(
    wrap: Callable[[nn.Module], Any] = DistributedDataParallel,
    after: Callable[[int, Any], None] = lambda i, model: None,
) -> tuple[list[float], Any]:
    """`after` is called when that many steps are over."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, x in enumerate(batches(), start=1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        after(i, model)
    return weights(model), model


def weights(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def under(knob: Knob, value: Value, run: Callable[[], tuple[list[float], Any]]) -> tuple[list[float], Any, KnobEffects]:
    with knob.applied(value) as effects:
        after, model = run()
    return after, model, effects


def accumulated_by_hand(batches_of_a_step: int) -> list[float]:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, x in enumerate(batches()):
        last = (i + 1) % batches_of_a_step == 0
        with nullcontext() if last else model.no_sync():
            (model(x).square().mean() / batches_of_a_step).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def averaged_by_hand(period: int) -> list[float]:
    def average(i: int, model: nn.Module) -> None:
        for p in model.parameters() if i % period == 0 else ():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()

    return train(lambda model: model, average)[0]


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def sharded() -> dict[str, object]:
    from torch.distributed.fsdp import fully_shard

    def shard(model: nn.Module) -> nn.Module:
        for module in (*(layer for layer in model.children() if isinstance(layer, nn.Linear)), model):
            fully_shard(module)
        return model

    plain, _ = train(shard)
    kept, _, effects = under(RESHARD_AFTER_FORWARD, False, lambda: train(shard))
    return {"difference": largest_difference(plain, kept), "counts": effects.counts}


def main() -> dict[str, object]:
    plain, model = train()
    found: dict[str, object] = {
        "as_written": [model.bucket_bytes_cap, model.gradient_as_bucket_view, model.static_graph]
    }
    for knob, value in ((BUCKET_CAP_MB, 0.5), (GRADIENT_AS_BUCKET_VIEW, True), (STATIC_GRAPH, True)):
        after, model, effects = under(knob, value, train)
        options = [model.bucket_bytes_cap, model.gradient_as_bucket_view, model.static_graph]
        found[knob.name] = [options, largest_difference(plain, after), effects.counts]
    after, model, effects = under(COMM_HOOK, "fp16", train)
    found["fp16"] = [len(model._comm_hooks), 0 < largest_difference(plain, after) < 1e-2, effects.counts]

    def with_own_hook(module: nn.Module) -> DistributedDataParallel:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = DistributedDataParallel(module)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        return wrapped

    _, model, effects = under(COMM_HOOK, "fp16", lambda: train(with_own_hook))
    found["own_hook"] = [len(model._comm_hooks), effects.refusals]
    after, model, effects = under(LOCAL_SGD, 4, train)
    found["local_sgd"] = [
        largest_difference(averaged_by_hand(4), after),
        effects.counts,
        model.require_backward_grad_sync,
    ]
    after, model, effects = under(ACCUMULATE, 4, train)
    by_hand = accumulated_by_hand(4)
    found["accumulate"] = [largest_difference(by_hand, after), effects.counts, model.require_backward_grad_sync]
    found["apart"] = largest_difference(plain, by_hand)
    found["fully_shard"] = sharded()
    found["put_back"] = largest_difference(plain, train()[0])
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = main()
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, found)
    if dist.get_rank() == 0:
        print(json.dumps(everybody))
    dist.destroy_process_group()
    os._exit(0)  # PyTorch may stand still where a Reducer is the last that holds a group
