"""What timing batches inside the DataLoader costs its throughput, at 1,000 items per second and worker.

Each block is one epoch of the same loader, timed from its first batch to its last, so that the start of workers does
not count. Blocks with the clock and without take turns, and a block with it is compared with the mean of the two
around it. An item takes 1 ms and goes through a transform, which is timed one by one: the dearest case. The cost of an
item alone is that of items that take no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import ratio_with_interval

ITEM_S = 0.001
BATCH, BATCHES = 16, 25
BLOCKS = 40
EMPTY_BATCHES = 400
TARGET = 1.01

Now = Callable[[], float]


class Items(Dataset[torch.Tensor]):
    """Each takes `item_s` of busy work and goes through a transform."""

    def __init__(self, count: int, item_s: float) -> None:
        self.count, self.item_s = count, item_s
        self.transform = torch.neg
        self.item = torch.zeros(8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + self.item_s
        while time.perf_counter() < end:
            pass
        return self.transform(self.item)


def measure() -> dict[str, object]:
    """Time of an epoch with the clock over one without, by workers, and what an item costs."""
    found: dict[str, object] = {}
    for workers in (0, 1, 2):
        loader = DataLoader(Items(BATCH * BATCHES, ITEM_S), batch_size=BATCH, num_workers=workers)
        found[f"{workers} workers"] = _ratios(loader, BLOCKS)
    empty = DataLoader(Items(BATCH * EMPTY_BATCHES, 0.0), batch_size=BATCH)
    bare, timed = _turns(empty, BLOCKS, time.process_time)
    over = [b - (left + right) / 2 for b, left, right in zip(timed, bare, bare[1:], strict=False)]
    item_us = 1e6 * np.array(over) / (BATCH * (EMPTY_BATCHES - 1))
    low, high = np.percentile(item_us, [2.5, 97.5])
    return {
        "item_s": ITEM_S,
        "epoch_ratio_to_bare": found,
        "us_per_item": {"median": float(np.median(item_us)), "blocks_95": [float(low), float(high)]},
        "target_ratio": TARGET,
    }


def _ratios(loader: Any, blocks: int) -> dict[str, object]:
    bare, timed = _turns(loader, blocks)
    same = [2 * b / (left + right) for b, left, right in zip(bare[1:-1], bare, bare[2:], strict=False)]
    ratios = [2 * b / (left + right) for b, left, right in zip(timed, bare, bare[1:], strict=False)]
    return {"clock": ratio_with_interval(ratios), "bare_against_bare": ratio_with_interval(same)}


def _turns(loader: Any, blocks: int, now: Now = time.perf_counter) -> tuple[list[float], list[float]]:
    bare, timed = [_epoch(loader, now, clock=False)], []
    for _ in range(blocks):
        timed.append(_epoch(loader, now, clock=True))
        bare.append(_epoch(loader, now, clock=False))
    return bare, timed


def _epoch(loader: Any, now: Now, *, clock: bool) -> float:
    """Seconds from its first batch to its last."""
    from gpulab.capture.dataloader.batch_clock import LoadingClock

    with ExitStack() as undo:
        if clock:
            ours = LoadingClock(time.perf_counter_ns())
            ours.start(undo)
        batches = iter(loader)
        next(batches)
        began = now()
        for _ in batches:
            pass
        took = now() - began
    if clock:
        made, missing, _ = ours.finish(None)
        assert made is not None and not missing, "nothing was timed"
    return took
