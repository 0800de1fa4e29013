"""Keeps DistributedDataParallel from exchanging gradients, as its `no_sync` does: for knobs that exchange later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from gpulab.torch_hooks.patching import replaced

if TYPE_CHECKING:
    from torch import Tensor


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
