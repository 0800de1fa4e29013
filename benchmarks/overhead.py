"""What `%%gpuprofile` adds to an unprofiled step, with the live view and without, against the bare cell and peers.

One kernel; each block is one run of the very same cell, which is traced and saved. Bare blocks and blocks of an arm
take turns, the arms in random order, and a block is compared with the mean of the bare blocks before and after it, so
that a machine that slowly changes its speed cancels out. On a quiet machine all of it takes four minutes.

A block's figure is the median step time by the cell's own clock; the fastest tenth of its steps stands beside it,
because a busy neighbour slows steps and never speeds one up. For gpulab only unprofiled steps count (its own
selection); for the peers every step does, for they profile them all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.harness import Figure, ratio_with_interval
from benchmarks.kernel import Kernel, kernel

SETUP = """
import tempfile, time
import numpy as np, torch
from torch import nn
from torch.profiler import profile, tensorboard_trace_handler
from torch.utils.data import DataLoader, TensorDataset
import gpulab
%load_ext gpulab
torch.set_num_threads(1)
loss_function = nn.CrossEntropyLoss()

def build(width, depth, steps, batch=16):
    global model, optimizer, loader
    layers = [nn.Linear(32, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = TensorDataset(torch.randn(steps * batch, 32), torch.randint(0, 10, (steps * batch,)))
    loader = DataLoader(data, batch_size=batch)

def block(rows=None):
    took = np.diff(stamps)
    took = took[5:] if rows is None else took[[r - 1 for r in rows if 1 <= r <= len(took)]]
    return [float(np.median(took)), float(np.percentile(took, 10)), stamps[-1]]
"""
CELL = """
stamps = []
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_function(model(x), y)
    loss.backward()
    optimizer.step()
    stamps.append(time.perf_counter())
"""
PEER = """
stamps = []
with profile({arguments}) as prof:
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        stamps.append(time.perf_counter())
"""
ARMS = {
    "bare": CELL,
    "gpulab": "%%gpuprofile" + CELL,
    "gpulab without live view": "%%gpuprofile --no-live" + CELL,
    "torch.profiler": PEER.format(arguments=""),
    "torch.profiler + tensorboard_trace_handler": PEER.format(
        arguments="on_trace_ready=tensorboard_trace_handler(tempfile.mkdtemp())"
    ),
}
OURS, PEERS = tuple(ARMS)[1:3], tuple(ARMS)[3:]
# name: (width, depth, steps per block, blocks of each arm of gpulab's, of each peer)
CASES = {"0.66 ms": (128, 4, 600, 16, 0), "1 ms": (128, 7, 400, 16, 0), "10 ms": (640, 8, 60, 16, 2)}
PAUSE = "import gc, time; gc.collect(); time.sleep(0.15)"  # what the last block left running ends here


def measure() -> dict[str, object]:
    """Ratios of each arm to the bare cell, per step length."""
    result = {}
    rng, load = random.Random(0), [os.getloadavg()[0]]
    with kernel() as session:
        session.run(SETUP)
        for case, (width, depth, steps, *blocks) in CASES.items():
            session.run(f"build({width}, {depth}, {steps})" + CELL)
            session.run(ARMS["gpulab"])  # the first run pays for imports
            turns = [arm for arms, count in zip((OURS, PEERS), blocks, strict=True) for arm in arms * count]
            rng.shuffle(turns)
            result[case] = {"steps_per_block": steps, **_summary(_sandwiches(session, turns))}
    return {"step_ratio_to_bare": result, "load_before_and_after": [*load, os.getloadavg()[0]]}


Block = tuple[float, float, float]  # median step, fastest tenth (s), seconds from the last step to the cell's end
Sandwich = tuple[Block, Block, Block]


def _sandwiches(session: Kernel, turns: list[str]) -> dict[str, list[Sandwich]]:
    """A block of each arm in turn between two bare ones, and under "bare" bare ones between such."""
    bare, result = [_block(session, "bare")], {arm: list[Sandwich]() for arm in dict.fromkeys(turns)}
    for arm in turns:
        block = _block(session, arm)
        bare.append(_block(session, "bare"))
        result[arm].append((bare[-2], block, bare[-1]))
    return {"bare": list(zip(bare, bare[1:], bare[2:], strict=False))[::2], **result}


def _summary(sandwiches: dict[str, list[Sandwich]]) -> dict[str, object]:
    bare = sandwiches.pop("bare")
    result: dict[str, object] = {
        "bare_step_ms": 1e3 * float(np.median([block[0] for _, block, _ in bare])),
        "bare_against_bare": _ratios(bare),
    }
    for arm, blocks in sandwiches.items():
        result[arm] = {**_ratios(blocks), "after_last_step_s": float(np.median([b[2] for _, b, _ in blocks]))}
    return result


def _ratios(blocks: list[Sandwich]) -> dict[str, object]:
    """Each block over the mean of its two neighbours, by median step and by the fastest tenth of the steps."""

    def over(column: int) -> dict[str, object]:
        return ratio_with_interval([2 * b[column] / (left[column] + right[column]) for left, b, right in blocks])

    return {"median": over(0), "fastest_tenth": over(1)}


def _block(session: Kernel, arm: str) -> Block:
    session.run(PAUSE)
    session.run(ARMS[arm])
    ended = session.value("time.perf_counter()")
    rows = "None"
    if arm in OURS:
        session.run("from gpulab.analysis.steps import select; rows = select(gpulab.runs[-1]).rows.tolist()")
        rows = "rows"
    median, tenth, last = session.value(f"block({rows})")
    return median, tenth, ended - last


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """What each arm adds to a step, by the median and by the fastest tenth of the steps, and the wait at the end."""
    for case, result in results["step_ratio_to_bare"].items():
        step = f"a step of {result['bare_step_ms']:.3g} ms"
        peers = [arm for arm in PEERS if arm in result]
        for arm in (*OURS, "bare_against_bare", *peers):
            target = case if arm in OURS else ""
            name = arm.replace("_", " ")
            yield Figure.of_ratio(f"{step}, {name}: median", result[arm]["median"], "+%", target)
            yield Figure.of_ratio(f"{step}, {name}: fastest tenth", result[arm]["fastest_tenth"], "+%", target)
        for arm in (*OURS, *peers):
            yield Figure(f"{step}, {arm}: last step to the cell's end", result[arm]["after_last_step_s"], "s")


def notes(results: Mapping[str, Any]) -> Iterator[str]:
    before, after = results["load_before_and_after"]
    yield f"Load of the machine over a minute: {before:.1f} before, {after:.1f} after. "
