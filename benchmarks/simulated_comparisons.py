"""Whether the statistics of a comparison keep their word: simulated experiments with noise of known kinds.

Coverage: how often the 95 % interval holds the truth where nothing changed. False: how often "faster" or "slower" is
said then; none: how often "no measurable difference" is. Found: how often a slowdown of 5 % is, and one of ten times.
The last three kinds of noise are those of a machine that other programs load. No clock is read: the same seed gives the
same table.
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
    "loaded: heavy tails": lambda rng, n: 0.15 * rng.standard_t(2, n),
    "loaded: starved": lambda rng, n: rng.normal(0, 0.05, n) + (rng.random(n) < 0.6) * rng.exponential(0.5, n),
    "loaded: a neighbour comes and goes": lambda rng, n: rng.normal(0, 0.03, n) + _neighbour(rng, n),
}
PAIRS = (3, 5, 10, 20, 30)
STAYS = 0.7  # how often a neighbour does in the next block what it did in this one


def _neighbour(rng: np.random.Generator, count: int) -> np.ndarray:
    turns = np.concatenate([[rng.random() < 0.5], rng.random(count - 1) > STAYS])
    return rng.uniform(0.3, 1.2, count) * (np.cumsum(turns) % 2)


def main(experiments: int = 2_000) -> None:
    """Print the table."""
    print(f"{experiments:,} simulated experiments each\n")
    print("| noise of a block | pairs | coverage | false verdicts | none told | 5 % found | 10 times found |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, noise in NOISES.items():
        for pairs in PAIRS:
            rng = np.random.default_rng(pairs)
            same = [_experiment(noise, pairs, 0.0, rng) for _ in range(experiments)]
            slower, ten = (
                np.mean([_experiment(noise, pairs, more, rng).verdict == "slower" for _ in range(experiments // 4)])
                for more in (0.05, 9.0)
            )
            covered = np.mean([c.interval is not None and c.interval[0] <= 1 <= c.interval[1] for c in same])
            false = np.mean([c.verdict in ("faster", "slower") for c in same])
            none = np.mean([c.verdict == "no measurable difference" for c in same])
            row = f"| {name} | {pairs} | {covered:.1%} | {false:.1%} | {none:.0%} | {slower:.0%} | {ten:.1%} |"
            print(row, flush=True)


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
