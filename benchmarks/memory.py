"""Memory of the kernel over a million steps with the live view: it must stay as it is while the run goes on.

A step takes hardly longer than its marks, so that a million of them last two minutes: a batch that is always the same
from a DataLoader, and an optimizer without work. One kernel, a process of its own, runs it with the magic, one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.harness import Figure
from benchmarks.kernel import kernel

STEPS = 1_000_000
EACH = 100_000  # steps between two readings
SETUP = """
import itertools, time
import psutil, torch
from torch.utils.data import DataLoader
import gpulab
%load_ext gpulab
torch.set_num_threads(1)
process, same = psutil.Process(), torch.zeros(4)

class Same(torch.utils.data.IterableDataset):
    def __iter__(self):
        return itertools.repeat(same)

class Idle(torch.optim.Optimizer):
    def step(self, closure=None):
        pass

optimizer, loader = Idle([torch.nn.Parameter(torch.zeros(1))], {}), DataLoader(Same(), batch_size=None)
"""
CELL = """
rss, began = [], time.perf_counter()
for step, batch in enumerate(loader):
    if step % %EACH% == 0:
        rss.append(process.memory_info().rss)
    if step == %STEPS%:
        break
    optimizer.step()
took = time.perf_counter() - began
""".replace("%EACH%", str(EACH)).replace("%STEPS%", str(STEPS))


def measure() -> dict[str, object]:
    """MiB before the first step and after each hundred thousand, with and without the magic, and the trace's size."""
    result: dict[str, object] = {"steps": STEPS, "each": EACH}
    for arm, head in (("gpulab", "%%gpuprofile\n"), ("bare", "")):
        with kernel() as session:
            session.run(SETUP)
            session.run(head + CELL)
            mib = [bytes_ / 2**20 for bytes_ in session.value("rss")]
            result[arm] = {"seconds": session.value("took"), "mib": mib}
            print(arm, *(f"{value:.1f}" for value in mib), "MiB")
            if arm == "gpulab":
                result["trace_events"] = session.value("gpulab.runs[-1].observer.event_count")
    return result


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The first reading is before the run is warm: growth counts from the second."""
    for arm, target in (("gpulab", "growth"), ("bare", "")):
        mib = results[arm]["mib"]
        about = f"{arm}, {results['steps']:,} steps in {results[arm]['seconds']:.0f} s"
        yield Figure(f"{about}: memory after {results['each']:,} steps", mib[1], "MiB")
        yield Figure(
            f"{arm}: growth for each further {results['each']:,}",
            (mib[-1] - mib[1]) / (len(mib) - 2),
            "MiB",
            target=target,
        )
    yield Figure("events in the trace", results["trace_events"])
