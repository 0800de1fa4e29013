"""Memory of the kernel over a run of 100,000 steps with the live view: it must not grow after the first minute."""

from __future__ import annotations

from benchmarks.kernel import kernel
from benchmarks.overhead import SETUP

STEPS = 100_000
CELL = """
rss = []
process = psutil.Process()
for step in range({steps}):
    optimizer.zero_grad()
    loss = loss_function(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 1000 == 0:
        rss.append((time.perf_counter() - began, process.memory_info().rss))
"""


def measure() -> dict[str, object]:
    """MiB at one minute and at the end, with and without the magic, and the trace's size."""
    found: dict[str, object] = {"steps": STEPS}
    for arm, head in (("gpulab", "%%gpuprofile\n"), ("bare", "")):
        with kernel() as session:
            session.run(SETUP + "import psutil\nbuild(128, 4, 2)\nx, y = next(iter(loader))\n")
            session.run("began = time.perf_counter()")
            session.run(head + CELL.format(steps=STEPS))
            rss = session.value("rss")
            found[arm] = {
                "seconds": rss[-1][0],
                "after_a_minute_mib": next((b for s, b in rss if s >= 60), rss[-1][1]) / 2**20,
                "at_the_end_mib": rss[-1][1] / 2**20,
            }
            if arm == "gpulab":
                found["trace_events"] = session.value("gpulab.runs[-1].observer.event_count")
    return found
