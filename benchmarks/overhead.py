"""What `%%gpuprofile` with the live view adds to an unprofiled step, against the bare cell and against peers.

One kernel; each block is one run of the very same cell. Bare blocks and blocks of an arm take turns, and a block is
compared with the mean of the bare blocks before and after it, so that a machine that slowly changes its speed cancels
out. A block's figure is the median step time by the cell's own clock; the fastest tenth of its steps stands beside it,
because a busy neighbour slows steps and never speeds one up. For gpulab only unprofiled steps count (its own
selection); for the peers every step does, for they profile them all.
"""

from __future__ import annotations

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
    "torch.profiler": PEER.format(arguments=""),
    "torch.profiler + tensorboard_trace_handler": PEER.format(
        arguments="on_trace_ready=tensorboard_trace_handler(tempfile.mkdtemp())"
    ),
}
PEERS = tuple(ARMS)[2:]
# name: (width, depth, steps per block, blocks of gpulab, blocks of each peer)
CASES = {"1 ms": (128, 4, 600, 40, 8), "10 ms": (640, 8, 80, 40, 8), "100 ms": (1800, 8, 24, 30, 6)}
PAUSE = "import gc, time; gc.collect(); time.sleep(0.3)"  # what the last block left running ends here


def measure() -> dict[str, object]:
    """Ratios of each arm to the bare cell, per step length."""
    found = {}
    with kernel() as session:
        session.run(SETUP)
        for case, (width, depth, steps, blocks, peer_blocks) in CASES.items():
            session.run(f"build({width}, {depth}, {steps})" + CELL)
            session.run(ARMS["gpulab"])  # the first run pays for imports
            sandwiches = {"gpulab": _turns(session, "gpulab", blocks)}
            sandwiches |= {peer: _turns(session, peer, peer_blocks) for peer in PEERS}
            found[case] = {"steps_per_block": steps, **_summary(sandwiches)}
    return {"step_ratio_to_bare": found}


Block = tuple[float, float, float]  # median step, fastest tenth (s), seconds from the last step to the cell's end


def _turns(session: Kernel, arm: str, count: int) -> tuple[list[Block], list[Block]]:
    """`count` blocks of the arm, and the `count + 1` bare ones around them."""
    bare, blocks = [_block(session, "bare")], []
    for _ in range(count):
        blocks.append(_block(session, arm))
        bare.append(_block(session, "bare"))
    return bare, blocks


def _summary(sandwiches: dict[str, tuple[list[Block], list[Block]]]) -> dict[str, object]:
    bare = sandwiches["gpulab"][0]
    found: dict[str, object] = {
        "bare_step_ms": 1e3 * float(np.median([b[0] for b in bare])),
        "bare_against_bare": _ratios(bare[::2], bare[1::2]),
    }
    for arm, (around, blocks) in sandwiches.items():
        after = float(np.median([b[2] for b in blocks]))
        found[arm] = {**_ratios(around, blocks), "after_last_step_s": after}
    return found


def _ratios(around: list[Block], blocks: list[Block]) -> dict[str, object]:
    """Each block over the mean of its two neighbours, by median step and by the fastest tenth of the steps."""

    def over(column: int) -> dict[str, object]:
        pairs = zip(blocks, around, around[1:], strict=False)
        return ratio_with_interval([2 * b[column] / (left[column] + right[column]) for b, left, right in pairs])

    return {"median": over(0), "fastest_tenth": over(1)}


def _block(session: Kernel, arm: str) -> Block:
    session.run(PAUSE)
    session.run(ARMS[arm])
    ended = session.value("time.perf_counter()")
    rows = "None"
    if arm == "gpulab":
        session.run("from gpulab.analysis.steps import select; rows = select(gpulab.runs[-1]).rows.tolist()")
        rows = "rows"
    median, tenth, last = session.value(f"block({rows})")
    return median, tenth, ended - last


def figures(kept: Mapping[str, Any]) -> Iterator[Figure]:
    """What each arm adds to a step, by the median and by the fastest tenth of the steps, and the wait at the end."""
    for case, found in kept["step_ratio_to_bare"].items():
        step = f"a step of {found['bare_step_ms']:.3g} ms"
        for arm in ("gpulab", "bare_against_bare", *PEERS):
            target = case if arm == "gpulab" else ""
            name = arm.replace("_", " ")
            yield Figure.of_ratio(f"{step}, {name}: median", found[arm]["median"], "+%", target)
            yield Figure.of_ratio(f"{step}, {name}: fastest tenth", found[arm]["fastest_tenth"], "+%", target)
        for arm in ("gpulab", *PEERS):
            yield Figure(f"{step}, {arm}: last step to the cell's end", found[arm]["after_last_step_s"], "s")
