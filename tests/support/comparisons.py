"""Made-up sides with known times, parts and losses, so that a comparison can be tested without a clock."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts
from gpulab.run import Change, Loader, Run
from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.record import Block, Comparison, Experiment, Side
from tests.support import synthetic
from tests.support.synthetic import MS

PARTS_A = {"data_wait": 0.6, "compute": 0.3, "optimizer": 0.05}
RESTORED = "weights, optimizer state, random numbers, data order"
DIFF = """--- the cell
+++ the cell with workers=2
@@ -1,1 +1,1 @@
-loader = DataLoader(data, batch_size=32)
+loader = DataLoader(data, batch_size=32, num_workers=2)"""


def facts_with(
    step_ms: float, shares: dict[str, float], *, batch: int = 32, workers: int = 0, name: str = "", seed: int = 1
) -> Facts:
    """A CPU run of 40 steps around `step_ms`, the last 8 traced and split by `shares`."""
    rng = np.random.default_rng(seed)
    wall = step_ms * (1 + 0.01 * rng.normal(0, 1, 40))
    phases = synthetic.phases(3, 29, 8)
    found = synthetic.steps(wall, wall * shares.get("data_wait", 0.0), phases, batch=batch)
    run = synthetic._run(f"20260801-0000{seed:02d}-aaaa", synthetic._cpu(), found, synthetic._cpu_timeline(found))
    loader = Loader("Digits", 1797, batch, workers, 2 if workers else None, False, False, 57, False)
    settings = replace(run.settings, name=name)
    samples = synthetic._cpu_samples(run.wall_ns, rng)
    run = replace(run, loader=loader, settings=settings, samples=samples)
    return synthetic.facts_of(run, synthetic.breakdown(run, shares))


def blocks(
    arm: int,
    step_ms: float,
    *,
    turns: int = 20,
    per_turn: int = 1,
    batch: int | None = 32,
    noise: float = 0.01,
    steps: int = 10,
    seed: int = 3,
    losses: tuple[float, ...] = (),
) -> tuple[Block, ...]:
    """Blocks with known noise; the arms of a turn run in the order A, B, A."""
    rng = np.random.default_rng(seed + 17 * arm)
    made = []
    for turn in range(turns):
        for again in range(per_turn):
            time_ns = int(steps * step_ms * MS * np.exp(rng.normal(0, noise)))
            order = 3 * turn + (2 * again if arm == 0 else 1)
            samples = None if batch is None else steps * batch
            made.append(Block(arm, turn, order, steps, 3, samples, time_ns, losses))
    return tuple(made)


def loss_curve(count: int = 40, *, seed: int = 0, scale: float = 0.03) -> tuple[float, ...]:
    """A loss that falls, with the noise of its seed."""
    noise = np.random.default_rng(seed).normal(0, scale, count)
    return tuple((2.3 * np.exp(-np.arange(count) / 15) + 0.2 + noise).tolist())


def as_written(**changes: Any) -> Side:
    """A: 38 ms a step, 60 % of it waiting."""
    side = Side(
        "baseline",
        {},
        facts_with(38.0, PARTS_A, seed=1),
        blocks(0, 38.0, per_turn=2),
        losses=loss_curve(),
    )
    return replace(side, **changes)


def faster(**changes: Any) -> Side:
    """B with two workers: 13 ms a step, hardly any waiting."""
    side = Side(
        "workers=2",
        {"workers": "2"},
        facts_with(13.2, {"data_wait": 0.02, "compute": 0.8, "optimizer": 0.12}, workers=2, seed=2),
        blocks(1, 13.1),
        checks=(
            Change("workers", "2", "0", "DataLoader option", "took effect", "2 worker processes gave 120 batches"),
        ),
        losses=loss_curve(),
        edit=DIFF,
        edit_is_diff=True,
    )
    return replace(side, **changes)


def alike(**changes: Any) -> Side:
    """B with a knob that changes nothing."""
    side = Side(
        "channels_last=on",
        {"channels_last": "on"},
        facts_with(38.1, PARTS_A, seed=5),
        blocks(1, 38.0),
        checks=(
            Change("channels_last", "on", "off", "module call", "took effect", "convolutions got channels_last inputs"),
        ),
        losses=loss_curve(),
        edit="model = model.to(memory_format=torch.channels_last)",
    )
    return replace(side, **changes)


def out_of_memory() -> Side:
    """A batch that did not fit."""
    return Side("batch_size=4096", {"batch_size": "4096"}, None, failure="out of memory at 3.1 GiB")


def batch(size: int, step_ms: float, seed: int) -> Side:
    """B with another batch size."""
    shares = {"data_wait": 0.3, "compute": 0.6, "optimizer": 0.05}
    return Side(
        f"batch_size={size}",
        {"batch_size": str(size)},
        facts_with(step_ms, shares, batch=size, seed=seed),
        blocks(1, step_ms, batch=size, seed=seed),
        losses=loss_curve(seed=seed),
        edit=f"DataLoader(data, batch_size={size})",
    )


def a_comparison(b: Side | None = None, a: Side | None = None) -> Comparison:
    """A against B."""
    return compare_blocks(a or as_written(), b or faster(), restored=RESTORED)


def a_sweep() -> Experiment:
    """Batch sizes, the last of which does not fit."""
    a = as_written()
    others = [batch(64, 60.0, 11), batch(128, 100.0, 12), batch(256, 198.0, 13), out_of_memory()]
    why = "another batch size is another training"
    compared = tuple(compare_blocks(a, b, restored=RESTORED, changes_training=why) for b in others)
    return Experiment((compared[0].a, *(c.b for c in compared)), compared, 74.0, name="batch")


def run_of(side: Side) -> Run:
    """The traced run of a side."""
    assert side.facts is not None
    return side.facts.run
