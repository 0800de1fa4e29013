"""What marks in place add to a step of less than a millisecond: a DataLoader, a backward pass, SGD; six marks a step.

One process; each block is a hundred steps of the same loop. Bare blocks and blocks of an arm take turns, and a block is
compared with the mean of the bare blocks before and after it. Between two marks torch's operators run, so that a mark
meets caches as cold as in a user's loop.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.harness import Figure, in_own_process, ratio_with_interval

STEPS, TURNS = 100, 150
ARMS = {
    "inline": "six marks written into the loop",
    "hooks": "marks by the table of hook points (a short run)",
}

Block = tuple[float, float]  # median step and fastest tenth, µs


def measure(steps: int = STEPS, turns: int = TURNS) -> dict[str, Any]:
    """Microseconds that each arm adds to a step."""
    return in_own_process("benchmarks.marks", "measured_here", steps=steps, turns=turns)


def measured_here(steps: int, turns: int) -> dict[str, Any]:
    """All blocks, in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, rng = _Training(steps), random.Random(0)
    for arm in ("bare", *ARMS):
        training.block(arm)
    load = [os.getloadavg()[0]]
    bare, sandwiches = [training.block("bare")], {arm: [] for arm in ARMS}
    for _ in range(turns):
        for arm in rng.sample(list(ARMS), len(ARMS)):
            block = training.block(arm)
            bare.append(training.block("bare"))
            sandwiches[arm].append((bare[-2], block, bare[-1]))
    idle = list(zip(bare, bare[1:], bare[2:], strict=False))[::2]
    return {
        "steps_per_block": steps,
        "load_before_and_after": [*load, os.getloadavg()[0]],
        "marks_per_step": training.inline / (steps * (turns + 1)),
        "bare_step_us": float(np.median([median for median, _ in bare])),
        "added_us": {arm: _added(blocks) for arm, blocks in {"bare": idle, **sandwiches}.items()},
    }


class _Training:
    """The loop of the overhead table's shortest step, on a model that is trained on and on."""

    def __init__(self, steps: int, batch: int = 16, width: int = 128, depth: int = 4) -> None:
        import torch
        from torch import nn

        hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), *hidden, nn.Linear(width, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        data = torch.utils.data.TensorDataset(torch.randn(steps * batch, 32), torch.randint(0, 10, (steps * batch,)))
        self.loader = torch.utils.data.DataLoader(data, batch_size=batch)
        self.inline = 0  # marks

    def block(self, arm: str) -> Block:
        """One epoch, of which the first five steps do not count."""
        from gpulab.capture.pilot import ShortRun
        from gpulab.tape.marks import Tape

        tape = Tape()
        with ExitStack() as undo:
            if arm == "hooks":
                undo.enter_context(ShortRun(10**9))
            stamps = self._marked(tape) if arm == "inline" else self._plain()
        self.inline += len(tape.marks())
        took = np.diff(stamps)[5:] / 1e3
        return float(np.median(took)), float(np.percentile(took, 10))

    def _plain(self) -> list[int]:
        from torch.nn.functional import cross_entropy

        stamps, now = [], time.perf_counter_ns
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            stamps.append(now())
        return stamps

    def _marked(self, tape: Any) -> list[int]:
        from torch.nn.functional import cross_entropy

        stamps, now, mark = [], time.perf_counter_ns, tape.mark
        for x, y in self.loader:
            mark(5, 16)
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x), y)
            mark(7, 0)
            loss.backward()
            mark(8, 0)
            mark(10, 1)
            self.optimizer.step()
            mark(11, 1)
            stamps.append(now())
            mark(3, 1)
        return stamps


def _added(blocks: list[tuple[Block, Block, Block]]) -> dict[str, Any]:
    """What the middle one takes more than the mean of its neighbours, µs: by median step, by the fastest tenth."""

    def over(column: int) -> dict[str, Any]:
        return ratio_with_interval([b[column] - (a[column] + c[column]) / 2 for a, b, c in blocks])

    return {"median": over(0), "fastest_tenth": over(1)}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Added microseconds, by the median and by the fastest tenth of the steps."""
    step = f"a step of {results['bare_step_us'] / 1e3:.2f} ms"
    for arm, words in {"bare": "bare against bare", **ARMS}.items():
        for which, result in results["added_us"][arm].items():
            target = "added" if arm in ARMS and which == "median" else ""
            yield Figure.of_ratio(f"{step}, {words}: {which.replace('_', ' ')}", result, "µs", target)


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    before, after = results["load_before_and_after"]
    yield f"Load of the machine over a minute: {before:.1f} before, {after:.1f} after. "
