"""What `%%gpuprofile` with the live view adds to an unprofiled step, against the bare cell and against peers.

One kernel, blocks in random order, each block one run of the very same cell; a block's figure is the median step time
by the cell's own clock. For gpulab only unprofiled steps count (its own selection); for the peers every step does, for
they profile them all.
"""

from __future__ import annotations

from benchmarks.harness import ratio_with_interval, shuffled_pairs
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

def step_s(rows=None):
    took = np.diff(stamps)
    if rows is None:
        return float(np.median(took[5:]))
    return float(np.median([took[r - 1] for r in rows if 1 <= r <= len(took)]))
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
# name: (width, depth, steps per block, blocks)
CASES = {"1 ms": (128, 4, 600, 12), "10 ms": (640, 8, 90, 12), "100 ms": (1800, 8, 26, 10)}


def measure() -> dict[str, object]:
    """Ratios of each arm to the bare cell, per step length."""
    found = {}
    with kernel() as session:
        session.run(SETUP)
        for case, (width, depth, steps, blocks) in CASES.items():
            found[case] = _case(session, width, depth, steps, blocks)
    return {"unprofiled_step_ratio_to_bare": found}


def _case(session: Kernel, width: int, depth: int, steps: int, blocks: int) -> dict[str, object]:
    session.run(f"build({width}, {depth}, {steps})" + CELL)
    took: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for order in shuffled_pairs(blocks, list(ARMS)):
        for arm in order:
            took[arm].append(_block(session, arm))
    bare = took.pop("bare")
    arms = {arm: ratio_with_interval([t / b for t, b in zip(times, bare, strict=True)]) for arm, times in took.items()}
    noise = ratio_with_interval([b / a for a, b in zip(bare[::2], bare[1::2], strict=False)])
    return {"bare_step_ms": 1e3 * sorted(bare)[len(bare) // 2], "bare_against_bare": noise, **arms}


def _block(session: Kernel, arm: str) -> float:
    session.run(ARMS[arm])
    if arm == "gpulab":
        session.run("from gpulab.analysis.steps import select; rows = select(gpulab.runs[-1]).rows.tolist()")
        return float(session.value("step_s(rows)"))
    return float(session.value("step_s()"))
