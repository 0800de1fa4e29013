"""Lesson 13: one of the trainings that share a core, in a separate process that ends with its input.

It trains for each line of its input, such as "starved 0.8", and answers with a line of JSON about that time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

import msgspec
import torch
from msgspec import Struct
from torch import nn

WAITING = 0.7  # the share of its step in which the starved training waits for data when alone
KINDS = ("starved", "busy")
_SAMPLE_STEPS = 15  # steps to measure the computing time of one


class Stretch(Struct, frozen=True):
    """The work of a training in a stretch of time. `asleep_s`: its simulated waits for data."""

    steps: int
    wall_s: float
    cpu_s: float
    asleep_s: float

    @property
    def per_s(self) -> float:
        """Steps per second."""
        return self.steps / self.wall_s

    @property
    def waited_fraction(self) -> float:
        """The share of the time in which it was ready to compute, but had no core."""
        return max(0.0, 1 - (self.cpu_s + self.asleep_s) / self.wall_s)


def training_step() -> Callable[[], object]:
    """A step of a small training on data in memory, on one thread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(128, 256), torch.randint(10, (128,))

    def step() -> None:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def cpu_seconds(step: Callable[[], object]) -> float:
    """CPU time of a step, independent of other programs."""
    times = []
    for _ in range(_SAMPLE_STEPS):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return statistics.median(times)


def train(step: Callable[[], object], asleep_s: float, seconds: float) -> Stretch:
    """Train for `seconds`, each step after a wait of `asleep_s` for its data."""
    steps, began, began_cpu = 0, time.perf_counter(), time.process_time()
    while (wall_s := time.perf_counter() - began) < seconds or steps == 0:
        if asleep_s:
            time.sleep(asleep_s)
        step()
        steps += 1
    return Stretch(steps, wall_s, time.process_time() - began_cpu, steps * asleep_s)


def answer(requests: TextIO, answers: TextIO) -> None:
    """Say "ready", then answer every line until the input ends."""
    step = training_step()
    compute_s = cpu_seconds(step)
    asleep_s = {"starved": compute_s * WAITING / (1 - WAITING), "busy": 0.0}
    print("ready", file=answers, flush=True)
    for line in requests:
        kind, seconds = line.split()
        done = train(step, asleep_s[kind], float(seconds))
        print(msgspec.json.encode(done).decode(), file=answers, flush=True)


def main(words: Sequence[str]) -> None:
    """`words`: the core to stay on."""
    os.sched_setaffinity(0, {int(words[0])})
    torch.set_num_threads(1)
    answer(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
