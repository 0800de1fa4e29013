"""Training loops played on a made-up machine of one host thread and one GPU stream: times follow from what is started.

A kernel begins when its start call has ended, the stream is free and the host has said so; a waiting call returns
when the stream is empty. Times are microseconds here, nanoseconds in the record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis.finding import RuleContext
from gpulab.run import Category, Device, Memory, Phase, Run, Samples, TraceOrigin
from gpulab.thresholds import DEFAULT, Thresholds
from tests.support import synthetic
from tests.support.timelines import MAIN, STREAM, Span, steps_between, timeline

START_US = 5  # of a call that starts something
DEVICES = {
    "V100": ("Tesla V100-SXM2-32GB", "7.0"),
    "A100": ("NVIDIA A100-SXM4-40GB", "8.0"),
    "H100": ("NVIDIA H100 80GB HBM3", "9.0"),
    "GTX 1660": ("NVIDIA GeForce GTX 1660", "7.5"),
    "unknown": ("GPU (name not in the trace)", None),
}


class Machine:
    """Plays one loop; every method is what the program does next."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.host = 0.0
        self.free = 0.0  # when the stream has nothing left
        self.steps: list[tuple[float, float, float]] = []  # start, end, waited for data
        self._begun = 0.0
        self._waited = 0.0
        self._correlation = 0

    def operator(self, name: str, kernel: str = "", gpu_us: float = 0, host_us: float = 10, **extra: float) -> None:
        """An operator that takes `host_us`, and starts a kernel where one is named."""
        start = self.host
        self.host += host_us
        if kernel:
            self._start("cudaLaunchKernel", kernel, Category.KERNEL, gpu_us, start + host_us / 4, extra)
        self._span(name, Category.CPU_OP, start, self.host)

    def launch(self, kernel: str, gpu_us: float) -> None:
        """A kernel that the program starts itself."""
        self._start("cudaLaunchKernel", kernel, Category.KERNEL, gpu_us, self.host, {})
        self.host += START_US

    def python(self, us: float) -> None:
        """Nothing that a trace shows."""
        self.host += us

    def item(self, name: str = "aten::item") -> None:
        """A value is read back: the host waits until the stream is empty."""
        start = self.host
        self._start("cudaMemcpyAsync", "Memcpy DtoH (Device -> Pageable)", Category.GPU_MEMCPY, 2, start + 2, {})
        self._wait("cudaStreamSynchronize", start + 2 + START_US)
        inner = {"aten::item": "aten::_local_scalar_dense", "aten::to": "aten::_to_copy"}.get(name)
        if inner is not None:
            self._span(inner, Category.CPU_OP, start + 1, self.host)
        self._span(name, Category.CPU_OP, start, self.host)

    def upload(self, us: float, pinned: bool) -> None:
        """A batch goes to the GPU; from ordinary memory the host waits for it."""
        start, kind = self.host, "Pinned" if pinned else "Pageable"
        copy = f"Memcpy HtoD ({kind} -> Device)"
        self._start("cudaMemcpyAsync", copy, Category.GPU_MEMCPY, us, start + 2, {"bytes": us * 10_000})
        self.host = start + 2 + START_US
        if not pinned:
            self._wait("cudaStreamSynchronize", self.host)
        self._span("aten::copy_", Category.CPU_OP, start + 1, self.host)
        self._span("aten::to", Category.CPU_OP, start, self.host + 1)
        self.host += 1

    def call(self, name: str, us: float, *, waits: bool = False) -> None:
        """A call of the runtime: a request for memory, a wait for everything."""
        if waits:
            self._wait(name, self.host, us)
        else:
            self._span(name, Category.CUDA_RUNTIME, self.host, self.host + us)
            self.host += us

    def load(self, us: float) -> None:
        """The loop waits for its next batch."""
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        self._span(name, Category.USER_ANNOTATION, self.host, self.host + us)
        self.host += us
        self._waited += us

    def mark(self, name: str, start: float) -> None:
        """What happened since `start` is part of that."""
        self._span(name, Category.USER_ANNOTATION, start, self.host)

    def end_step(self) -> None:
        """One step is over."""
        self.steps.append((self._begun, self.host, self._waited))
        self._span(f"ProfilerStep#{len(self.steps)}", Category.USER_ANNOTATION, self._begun, self.host)
        self._begun, self._waited = self.host, 0.0

    def case(self, gpu: str = "V100", thresholds: Thresholds = DEFAULT, **given: Any) -> RuleContext:
        """The figures with thresholds."""
        return RuleContext(self.facts(gpu, **given), thresholds)

    def facts(
        self,
        gpu: str = "V100",
        *,
        unprofiled_us: float | None = None,
        **changes: Any,
    ) -> Facts:
        """The figures of the loop's profiled steps; `unprofiled_us`: as many steps before them, of that length."""
        found = timeline(self.spans)
        traced, before = len(self.steps), len(self.steps) if unprofiled_us is not None else 0
        ahead = [(i - before) * (unprofiled_us or 0.0) * 1e3 for i in range(before)]
        start = np.array([*ahead, *(s * 1e3 for s, _, _ in self.steps)], dtype=np.int64)
        end = np.array([*(a + (unprofiled_us or 0.0) * 1e3 for a in ahead), *(e * 1e3 for _, e, _ in self.steps)])
        wait = np.array([0.0] * before + [w * 1e3 for _, _, w in self.steps])
        phase = [Phase.MEASURED] * before + [Phase.TRACED] * traced
        steps = steps_between(start, end, data_wait_ns=wait, batch_count=1, sample_count=8, phase=phase)
        name, capability = DEVICES[gpu]
        device = Device("cuda", name, 0, memory_total_bytes=32 << 30, details={"compute_capability": capability})
        base = synthetic.cpu_case().facts.run
        unmeasured = {"loader": None, "missing": (), "pauses": (), "memory": Memory(), "samples": Samples()}
        run: Run = replace(
            base,
            device=device,
            steps=steps,
            timeline=found,
            traced_numbers=tuple(range(before, before + traced)),
            origin=TraceOrigin("made.json", 1, 1, "ns", 0, len(found)),
            source="trace",
            **{**unmeasured, **changes},
        )
        run.check()
        return facts(run)

    def _start(self, call: str, name: str, category: Category, us: float, at: float, extra: dict[str, float]) -> None:
        self._correlation += 1
        self._span(call, Category.CUDA_RUNTIME, at, at + START_US, self._correlation)
        begin = max(self.free, at + START_US + 1)
        self.free = begin + us
        self._add(Span(name, category, STREAM, round(begin * 1e3), round(us * 1e3), self._correlation, extra))

    def _wait(self, call: str, at: float, own_us: float = 1) -> None:
        self.host = max(self.free, at) + own_us
        self._span(call, Category.CUDA_RUNTIME, at, self.host)

    def _span(self, name: str, category: Category, start: float, end: float, correlation: int = 0) -> None:
        self._add(Span(name, category, MAIN, round(start * 1e3), round((end - start) * 1e3), correlation))

    def _add(self, span: Span) -> None:
        self.spans.append(span)


def loop(step: object, steps: int = 6) -> Machine:
    """Plays `step(machine)` that often."""
    machine = Machine()
    assert callable(step)
    for _ in range(steps):
        step(machine)
        machine.host = max(machine.host, machine.free)  # the queue is full: the host is never a whole step ahead
        machine.end_step()
    return machine
