"""Whether the statistics of a comparison keep their word: simulated experiments with noise of known kinds.

Coverage: how often the 95 % interval holds the truth where nothing changed. False: how often "faster" or "slower" is
said then. Found: how often a slowdown of 5 % is. No clock is read: the same seed gives the same table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np

from gpulab.tuning.compare.blocks import compare_blocks
from gpulab.tuning.record import Block, Comparison, Side

Noise = Callable[[np.random.Generator, int], np.ndarray]  # of the logarithm of a block's time

NOISES: dict[str, Noise] = {
    "1 %": lambda rng, n: rng.normal(0, 0.01, n),
    "3 %": lambda rng, n: rng.normal(0, 0.03, n),
    "heavy tails": lambda rng, n: 0.02 * rng.standard_t(2, n),
    "spikes": lambda rng, n: rng.normal(0, 0.01, n) + (rng.random(n) < 0.15) * rng.exponential(0.3, n),
    "random walk": lambda rng, n: rng.normal(0, 0.01, n) + np.cumsum(rng.normal(0, 0.01, n)),
    "ramp of 40 %": lambda rng, n: rng.normal(0, 0.01, n) + np.linspace(0, 0.4, n),
}
PAIRS = (3, 5, 10, 20, 30)


def main(experiments: int = 2_000) -> None:
    """Print the table."""
    print(f"{experiments:,} simulated experiments each\n")
    print("| noise of a block | pairs | coverage | false verdicts | 5 % found |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, noise in NOISES.items():
        for pairs in PAIRS:
            rng = np.random.default_rng(pairs)
            same = [_experiment(noise, pairs, 0.0, rng) for _ in range(experiments)]
            slower = [_experiment(noise, pairs, 0.05, rng) for _ in range(experiments // 4)]
            covered = np.mean([c.interval is not None and c.interval[0] <= 1 <= c.interval[1] for c in same])
            false = np.mean([c.verdict != "no measurable difference" for c in same])
            found = np.mean([c.verdict == "slower" for c in slower])
            print(f"| {name} | {pairs} | {covered:.1%} | {false:.1%} | {found:.0%} |", flush=True)


def _experiment(noise: Noise, turns: int, effect: float, rng: np.random.Generator) -> Comparison:
    """A, A and B in random order in each turn."""
    moved = noise(rng, 3 * turns)
    blocks = []
    for order, arm in enumerate(np.concatenate([rng.permutation([0, 0, 1]) for _ in range(turns)])):
        time_ns = 1e8 * (1 + effect * arm) * math.exp(moved[order])
        blocks.append(Block(int(arm), order // 3, order, 10, 3, None, int(time_ns)))
    a, b = (tuple(block for block in blocks if block.arm == arm) for arm in (0, 1))
    return compare_blocks(Side("as written", {}, None, a), Side("B", {"B": "1"}, None, b))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
