"""A slow link between ranks on one machine: each exchange sleeps for as long as its bytes would take.

The sleep is part of the exchange itself, on the backend's thread: the training continues meanwhile, and a trace shows
the exchange in full length.
"""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LATENCY_MS = 3.0


class SlowLink:
    """A link that carries `mb_per_s` megabytes per second, one exchange at a time, each with `latency_ms`.

    `sixteen_bits`: gradients are sent and summed as float16.
    """

    def __init__(self, mb_per_s: float, latency_ms: float = LATENCY_MS, *, sixteen_bits: bool = False) -> None:
        if mb_per_s <= 0 or latency_ms < 0:
            raise ValueError("a link carries something, and no latency is negative")
        self.mb_per_s = mb_per_s
        self.latency_ms = latency_ms
        self.sixteen_bits = sixteen_bits
        self._busy = threading.Lock()

    def all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """A communication hook: `ddp.register_comm_hook(link, SlowLink.all_reduce)`."""
        return self._carry(bucket.buffer())

    def average(self, model: nn.Module) -> None:
        """Replace the weights of every rank's model by their mean over the ranks, in one exchange."""
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(self._carry(weights).wait(), model.parameters())

    def seconds(self, size_bytes: int, ranks: int) -> float:
        """Time of an all-reduce: 2(n-1)/n times its bytes cross each rank's link (definitions.md, "All-reduce")."""
        return self.latency_ms / 1e3 + 2 * (ranks - 1) / ranks * size_bytes / (self.mb_per_s * 1e6)

    def _carry(self, values: Tensor) -> torch.futures.Future[Tensor]:
        """The mean of the values over the ranks, in place, after the time on the link."""
        ranks = dist.get_world_size()
        sent = values.half() if self.sixteen_bits else values

        def arrive(_: Any) -> Tensor:
            with self._busy:
                time.sleep(self.seconds(sent.nbytes, ranks))
            if sent is not values:
                values.copy_(sent)
            return values.div_(ranks)

        work: Any = dist.all_reduce(sent, async_op=True)
        carried: torch.futures.Future[Tensor] = work.get_future().then(arrive)
        return carried
