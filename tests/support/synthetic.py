"""Made-up runs with known figures, so that a test of a view or a rule needs neither torch nor a clock.

Each builder returns a `Case`: the record, the facts about it, and a diagnosis. The breakdown is computed here from the
layout of the made-up steps, not by gpulab's own accounting, and `Run.check` holds for every case.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from gpulab.analysis.breakdown import PARTS, Breakdown, StepParts
from gpulab.analysis.facts import CurveFact, Facts, trace_facts
from gpulab.analysis.integrity import integrity
from gpulab.analysis.operators import CostRow
from gpulab.analysis.steps import select, spread
from gpulab.diagnosis.finding import Diagnosis, Evidence, Finding, Undetermined
from gpulab.diagnosis.headline import Headline, headline
from gpulab.prediction.prediction import Prediction
from gpulab.run import (
    Category,
    Choice,
    Device,
    Environment,
    Lane,
    Loader,
    Memory,
    Missing,
    Observer,
    Outcome,
    Phase,
    Run,
    Samples,
    Series,
    Settings,
    StepFlag,
    Steps,
    Timeline,
)
from gpulab.timeline.memory_curve import memory

MS = 1_000_000
HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b[0m $x_1$ \u202egnp.exe & 'q' \"d\"\nline two 日本"


class Case(Struct, frozen=True):
    """One made-up run, what is true about it, and what was found."""

    run: Run
    facts: Facts
    diagnosis: Diagnosis

    @property
    def headline(self) -> Headline:
        return headline(self.diagnosis)


def said(key: str, summary: str, evidence: str, level: str) -> Diagnosis:
    """A diagnosis of one finding, with all that a finding can have where it is a bad one."""
    bad = level == "bad"
    found = Finding(
        key,
        summary,
        (Evidence(evidence, (50 * MS, 80 * MS)), Evidence(evidence)) if bad else (Evidence(evidence),),
        5_000.0 if bad else None,
        "measured",
        parts=("data_wait",),
        settings=(("workers", "2"),) if bad else (),
        cure=summary if bad else "",
        lesson="03_starving_gpu" if bad else "",
        source_line=evidence if bad else "",
        prediction=Prediction({"workers": "2"}, 0.6, (0.5, 0.7), evidence) if bad else None,
        after=summary if bad else "",
        level=level,  # type: ignore[arg-type]
    )
    untold = (Undetermined("storage_bound", summary, evidence),) if bad else ()
    return Diagnosis((found,), untold, 20_000.0, 20_000.0, notes=(summary,) if bad else ())


class _Spans(Struct):
    """Collects spans in any order; `timeline` sorts them as the record demands."""

    lanes: list[Lane] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)

    def lane(self, kind: str, number: int, label: str = "", process: int = 4000) -> int:
        self.lanes.append(Lane(kind, process, number, label))  # type: ignore[arg-type]
        return len(self.lanes) - 1

    def add(self, lane: int, category: Category, name: str, start: float, end: float, correlation: int = 0) -> None:
        name_id = self.names.setdefault(name, len(self.names))
        self.rows.append((int(start), int(end) - int(start), name_id, int(category), lane, correlation))

    def timeline(self, window: tuple[int, int], training_lane: int | None) -> Timeline:
        columns = np.array(sorted(self.rows, key=lambda r: (r[0], -r[1])), dtype=np.int64).reshape(-1, 6).T
        return Timeline(
            start_ns=columns[0].copy(),
            duration_ns=columns[1].copy(),
            name_id=columns[2].astype(np.int32),
            category=columns[3].astype(np.uint8),
            lane_id=columns[4].astype(np.int32),
            correlation=columns[5].copy(),
            names=tuple(self.names),
            lanes=tuple(self.lanes),
            window_ns=window,
            training_lane=training_lane,
        )


def environment() -> Environment:
    """A laptop with four cores."""
    return Environment("3.11.2", "Linux-6.1-x86_64", "Example CPU @ 2.4 GHz", 4, 4.0, 16 * 2**30, {"torch": "2.13.0"})


def steps(
    wall_ms: np.ndarray, wait_ms: np.ndarray, phases: list[Phase], *, optimizer_ms: float = 1.0, batch: int = 32
) -> Steps:
    """Steps back to back from 50 ms on."""
    count = len(wall_ms)
    wall = (np.asarray(wall_ms) * MS).astype(np.int64)
    end = 50 * MS + np.cumsum(wall)
    flags = np.zeros(count, np.uint8)
    if count:
        flags[0] |= StepFlag.FIRST | StepFlag.EPOCH_START
        flags[-1] |= StepFlag.LAST
        traced = [i for i, phase in enumerate(phases) if phase == Phase.TRACED]
        for i in [traced[0] - 1, traced[-1] + 1] if traced else []:
            if 0 <= i < count:
                flags[i] |= StepFlag.PROFILER_EDGE
    return Steps(
        number=np.arange(count, dtype=np.int64),
        start_ns=end - wall,
        end_ns=end,
        data_wait_ns=(np.asarray(wait_ms) * MS).astype(np.int64),
        optimizer_ns=np.full(count, int(optimizer_ms * MS), np.int64),
        batch_count=np.ones(count, np.int64),
        sample_count=np.full(count, batch, np.int64),
        phase=np.array([int(p) for p in phases], np.uint8),
        flags=flags,
    )


def phases(warmup: int, measured: int, traced: int, after: int = 0) -> list[Phase]:
    """The phases of a capture in their order."""
    return [Phase.WARMUP] * warmup + [Phase.MEASURED] * measured + [Phase.TRACED] * traced + [Phase.MEASURED] * after


def breakdown(run: Run, shares: dict[str, float], busy: float | None = None) -> Breakdown:
    """The traced steps split by fixed shares; what is left after rounding is unknown, so that the parts sum exactly."""
    rows = np.flatnonzero(run.steps.phase == Phase.TRACED)
    parts = []
    for i in rows:
        wall = int(run.steps.wall_ns[i])
        ns = {part: int(wall * shares.get(part, 0.0)) for part in PARTS}
        ns["unknown"] += wall - sum(ns.values())
        parts.append(
            StepParts(
                int(run.steps.number[i]),
                int(run.steps.start_ns[i]),
                int(run.steps.end_ns[i]),
                ns,
                int(run.steps.flags[i]),
                (int(run.steps.start_ns[i]), int(run.steps.end_ns[i])),
            )
        )
    total = sum(p.end_ns - p.start_ns for p in parts)
    by_wall = sorted(parts, key=lambda p: p.end_ns - p.start_ns)
    return Breakdown(
        device=run.device.name,
        device_index=run.device.index,
        steps=tuple(parts),
        median_us={part: float(np.median([p.parts_ns[part] for p in parts])) / 1e3 for part in PARTS},
        share={part: sum(p.parts_ns[part] for p in parts) / total for part in PARTS},
        median_step=by_wall[len(by_wall) // 2].number,
        busy_fraction=busy,
        kernel_busy_fraction=None if busy is None else 0.9 * busy,
    )


def facts_of(
    run: Run,
    found: Breakdown | None = None,
    operators: tuple[CostRow, ...] = (),
    kernels: tuple[CostRow, ...] = (),
) -> Facts:
    """The facts of a made-up run, with figures from its own columns."""
    selection = select(run)
    rows = selection.rows
    traced = np.flatnonzero(run.steps.phase == Phase.TRACED)
    step_us = spread(run.steps.wall_ns[rows])
    wall_s = run.steps.wall_ns[rows].sum() / 1e9
    return Facts(
        run=run,
        selection=selection,
        step_us=step_us,
        traced_step_us=spread(run.steps.wall_ns[traced]),
        data_wait_us=spread(run.steps.data_wait_ns[rows]) if run.loader else None,
        optimizer_us=spread(run.steps.optimizer_ns[rows]),
        samples_per_s=float(run.steps.sample_count[rows].sum() / wall_s) if step_us and run.loader else None,
        steps_per_s=len(rows) / wall_s if step_us else None,
        outside_steps_fraction=float(1 - run.steps.wall_ns.sum() / run.wall_ns) if len(run.steps) else None,
        observer_us_per_step=run.observer.hooks_ns / 1e3 / len(run.steps) if len(run.steps) else None,
        breakdown=found,
        integrity=integrity(run),
        trace=trace_facts(run, (found,) if found else ()),
        memory=memory(run.memory_events),
        operators=operators,
        kernels=kernels,
        curves=tuple(
            CurveFact(s.name, s.label, s.unit, s.source, float(s.value.mean()), float(s.value.max()), len(s.value))
            for s in run.samples.series
            if len(s.value)
        ),
    )


def cpu_case() -> Case:
    """30 steps on a CPU, about 60 % of each spent waiting for the DataLoader."""
    rng = np.random.default_rng(7)
    wall = 38 + rng.normal(0, 1.5, 30)
    wall[0] = 160.0
    wait = wall * 0.6
    found = steps(wall, wait, phases(3, 18, 5, 4))
    run = _run(
        "20260801-101500-a1b2", _cpu(), found, _cpu_timeline(found), name="digits-cnn", loader=_loader(workers=0)
    )
    run = replace(run, samples=_cpu_samples(run.wall_ns, rng))
    split = breakdown(run, {"data_wait": 0.6, "compute": 0.3, "optimizer": 0.05})
    found_out = said(
        "data_wait",
        "60 % of each step is spent waiting for the DataLoader: the model computes only the rest of the time.",
        "Waiting for the DataLoader: 22.8 ms of 38.0 ms per step (median of 16 untraced steps).",
        "bad",
    )
    return Case(run, facts_of(run, split, _cpu_operators()), found_out)


def gpu_case() -> Case:
    """60 steps on a GPU with two streams, short of data and partly launch-bound."""
    rng = np.random.default_rng(8)
    wall = 12 + rng.normal(0, 0.6, 60)
    wait = wall * 0.3
    found = steps(wall, wait, phases(5, 40, 6, 9), optimizer_ms=0.8, batch=256)
    device = Device("cuda", "NVIDIA H100 80GB HBM3", 0, "GPU-0", 80 * 2**30, {"driver": "570.1"})
    run = _run(
        "20260801-111500-c3d4",
        device,
        found,
        _gpu_timeline(found),
        name="resnet50",
        loader=_loader(workers=4, pinned=True),
    )
    run = replace(
        run,
        samples=_gpu_samples(run.wall_ns, rng),
        memory=Memory(21 * 2**30, 24 * 2**30, 6 * 2**30, 80 * 2**30),
        missing=(
            Missing("SM activity, occupancy and tensor activity", "NVML GPM answered NotSupported", 240 * MS, "curve"),
        ),
    )
    shares = {
        "data_wait": 0.3,
        "compute": 0.36,
        "communication": 0.04,
        "memcpy": 0.05,
        "memset": 0.004,
        "sync_wait": 0.08,
    }
    split = breakdown(
        run, {**shares, "launch": 0.1, "optimizer": 0.03, "allocator": 0.006, "queued": 0.002}, busy=0.454
    )
    found_out = said(
        "data_wait",
        "The GPU is idle for 55 % of each step, mostly because the next batch is not ready.",
        "3.6 ms of 12.0 ms per step: GPU idle while the loop waits for the DataLoader (median of 6 traced steps).",
        "bad",
    )
    return Case(run, facts_of(run, split, _gpu_operators(), _gpu_kernels()), found_out)


def tiny_case() -> Case:
    """Two steps, the second one profiled: too few for a throughput figure."""
    found = steps(np.array([55.0, 31.0]), np.array([4.0, 3.0]), phases(1, 0, 1))
    run = _run("20260801-121500-e5f6", _cpu(), found, _cpu_timeline(found), loader=_loader(workers=0))
    split = breakdown(run, {"data_wait": 0.1, "compute": 0.8, "optimizer": 0.05})
    found_out = said("unknown", "Two steps are too few to name a bottleneck.", "1 traced step.", "unknown")
    return Case(run, facts_of(run, split, _cpu_operators()[:3]), found_out)


def no_step_case() -> Case:
    """A cell without any step, stopped by an exception; nothing was traced."""
    run = _run("20260801-131500-0a0b", _cpu(), Steps.empty(), None, source="whole cell", outcome="failed")
    run = replace(
        run,
        outcome_detail="ValueError: a message of the user's own",
        missing=(
            Missing(
                "step breakdown, operators and kernels",
                "another torch.profiler is active in this process",
                key="breakdown",
            ),
        ),
        samples=_cpu_samples(run.wall_ns, np.random.default_rng(9)),
    )
    found_out = said("unknown", "No training step was found in this cell.", "The cell ran for 500 ms.", "unknown")
    return Case(run, facts_of(run), found_out)


def no_trace_case() -> Case:
    """200 steps without the profiler and without any meter."""
    wall = 5 + np.random.default_rng(10).normal(0, 0.1, 200)
    found = steps(wall, wall * 0.02, phases(10, 190, 0), optimizer_ms=0.4)
    run = _run("20260801-141500-1c1d", _cpu(), found, None, name="no trace", trace=False, loader=_loader(workers=2))
    run = replace(run, missing=(Missing("device curves", "the sampling process did not start", key="curves"),))
    found_out = said(
        "good", "Nothing stands out: the steps are even and the DataLoader keeps up.", "2 % data wait.", "good"
    )
    return Case(run, facts_of(run), found_out)


def hostile_case() -> Case:
    """Every name a user or a trace can choose holds HTML, terminal escapes, mathtext and bidi controls."""
    case = cpu_case()
    run = case.run
    assert run.timeline is not None and run.loader is not None
    run = replace(
        run,
        id=HOSTILE,
        settings=replace(run.settings, name=HOSTILE),
        device=replace(run.device, name=HOSTILE),
        loader=replace(run.loader, dataset=HOSTILE),
        outcome="failed",
        outcome_detail=HOSTILE,
        step_source=HOSTILE,
        timeline=replace(
            run.timeline,
            names=tuple(HOSTILE + name for name in run.timeline.names),
            lanes=tuple(replace(lane, label=HOSTILE) for lane in run.timeline.lanes),
        ),
        samples=Samples(tuple(replace(s, label="_" + HOSTILE, source=HOSTILE) for s in run.samples.series)),
        missing=(Missing(HOSTILE, HOSTILE),),
        choices=(Choice(HOSTILE, HOSTILE, HOSTILE),),
        observer=replace(run.observer, window_truncated=HOSTILE),
    )
    operators = tuple(replace(row, name=HOSTILE + row.name) for row in case.facts.operators)
    found_out = said("data_wait", HOSTILE, HOSTILE, "bad")
    return Case(run, facts_of(run, case.facts.breakdown, operators), found_out)


def long_case(count: int = 20_000) -> Case:
    """A long run: more steps than a picture has pixels, two epochs with a pause between them, and a stall."""
    rng = np.random.default_rng(11)
    wall = 20 + rng.normal(0, 1.0, count)
    wall[count // 3] = 4_000.0
    found = steps(wall, wall * 0.1, phases(10, count - 30, 6, 14))
    pause = np.where(np.arange(count) >= count // 2, 30_000 * MS, 0)
    found = replace(found, start_ns=found.start_ns + pause, end_ns=found.end_ns + pause)
    run = _run("20260801-151500-2e2f", _cpu(), found, _cpu_timeline(found), name="long", loader=_loader(workers=2))
    run = replace(run, samples=_cpu_samples(run.wall_ns, rng))
    split = breakdown(run, {"data_wait": 0.1, "compute": 0.8, "optimizer": 0.05})
    found_out = said("good", "Nothing stands out.", "Waiting for the DataLoader: 2.0 ms of 20.0 ms per step.", "good")
    return Case(run, facts_of(run, split, _cpu_operators()), found_out)


def dense_case(spans: int = 100_000) -> Case:
    """A GPU run whose one profiled step holds `spans` host operators, launches and kernels: most are under a pixel."""
    found = steps(np.full(12, 400.0), np.full(12, 20.0), phases(3, 6, 1, 2))
    collected = _Spans()
    training = collected.lane("thread", 4711)
    stream = collected.lane("stream", 7, process=0)
    i = int(np.flatnonzero(found.phase == Phase.TRACED)[0])
    start, end = int(found.start_ns[i]), int(found.end_ns[i])
    pitch = (end - start - 30 * MS) / (spans // 4)
    for k in range(spans // 4):
        t = start + 25 * MS + k * pitch
        collected.add(training, Category.CPU_OP, f"aten::op{k % 40}", t, t + 0.9 * pitch)
        collected.add(training, Category.CPU_OP, "aten::inner", t + 0.1 * pitch, t + 0.8 * pitch)
        collected.add(training, Category.CUDA_RUNTIME, "cudaLaunchKernel", t + 0.3 * pitch, t + 0.6 * pitch, k + 1)
        collected.add(stream, Category.KERNEL, f"kernel{k % 25}", t + 0.7 * pitch, t + pitch, k + 1)
    timeline = collected.timeline((start, end), training)
    device = Device("cuda", "NVIDIA L4", 0, "GPU-1", 24 * 2**30)
    run = _run("20260801-161500-3a3b", device, found, timeline, name="dense", loader=_loader(workers=4))
    split = breakdown(run, {"data_wait": 0.05, "compute": 0.3, "launch": 0.6}, busy=0.3)
    found_out = said("launch", "The GPU waits for the program to launch work.", "240 ms of 400 ms per step.", "bad")
    return Case(run, facts_of(run, split, _gpu_operators(), _gpu_kernels()), found_out)


def cases() -> dict[str, Case]:
    """Every small case by its name."""
    builders: dict[str, Callable[[], Case]] = {
        "cpu": cpu_case,
        "gpu": gpu_case,
        "tiny": tiny_case,
        "no_step": no_step_case,
        "no_trace": no_trace_case,
        "hostile": hostile_case,
    }
    return {name: build() for name, build in builders.items()}


def _run(
    run_id: str,
    device: Device,
    found: Steps,
    timeline: Timeline | None,
    *,
    name: str = "",
    loader: Loader | None = None,
    source: str = "DataLoader",
    outcome: Outcome = "completed",
    trace: bool = True,
) -> Run:
    traced = tuple(int(n) for n in found.number[found.phase == Phase.TRACED]) if timeline is not None else ()
    run = Run(
        id=run_id,
        created="2026-08-01T10:15:00Z",
        source="cell",
        settings=Settings(name=name, trace=trace),
        device=device,
        environment=environment(),
        steps=found,
        samples=Samples(),
        timeline=timeline,
        wall_ns=int(found.end_ns[-1]) + 40 * MS if len(found) else 500 * MS,
        outcome=outcome,
        step_source=source,
        code="for x, y in loader:\n    train(x, y)\n",
        loader=loader,
        memory=Memory(peak_rss_bytes=900 * 2**20, total_bytes=16 * 2**30),
        observer=Observer(14_000 * len(found), 310 * MS, 95 * MS, len(timeline))
        if timeline
        else Observer(9_000 * len(found)),
        choices=(Choice("warm-up", "3 steps", "the first steps build caches"),) if len(found) else (),
        traced_numbers=traced,
    )
    run.check()
    return run


def _cpu() -> Device:
    return Device("cpu", "Example CPU @ 2.4 GHz", memory_total_bytes=16 * 2**30)


def _loader(workers: int, pinned: bool = False) -> Loader:
    return Loader("DigitImages", 1797, 32, workers, 2 if workers else None, pinned, False, 57, False)


def _cpu_timeline(found: Steps) -> Timeline:
    collected = _Spans()
    training, autograd = collected.lane("thread", 4711), collected.lane("thread", 4720)
    rows = np.flatnonzero(found.phase == Phase.TRACED)
    for i in rows:
        start, wall, wait = int(found.start_ns[i]), int(found.wall_ns[i]), int(found.data_wait_ns[i])
        end, rest = start + wall, wall - wait
        next_batch = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        collected.add(training, Category.USER_ANNOTATION, f"ProfilerStep#{i}", start, end)
        collected.add(training, Category.USER_ANNOTATION, next_batch, start, start + wait)
        collected.add(training, Category.CPU_OP, "aten::stack", start + 0.8 * wait, start + 0.95 * wait)
        collected.add(training, Category.CPU_OP, "aten::cat", start + 0.82 * wait, start + 0.93 * wait)
        t = start + wait + 0.02 * rest
        for k, name in enumerate(("aten::conv2d", "aten::relu", "aten::conv2d", "aten::max_pool2d", "aten::linear")):
            width = (0.11, 0.02, 0.13, 0.05, 0.03)[k] * rest
            collected.add(training, Category.CPU_OP, name, t, t + width)
            if name == "aten::conv2d":
                collected.add(training, Category.CPU_OP, "aten::convolution", t + 0.02 * width, t + 0.97 * width)
                collected.add(training, Category.CPU_OP, "aten::mkldnn_convolution", t + 0.06 * width, t + 0.94 * width)
            t += width * 1.05
        backward = t + 0.02 * rest
        for k in range(6):
            a = backward + k * 0.06 * rest
            collected.add(
                autograd, Category.CPU_OP, "autograd::engine::evaluate_function: ConvBackward", a, a + 0.055 * rest
            )
            collected.add(autograd, Category.CPU_OP, "aten::convolution_backward", a + 0.004 * rest, a + 0.05 * rest)
        a = backward + 0.4 * rest
        collected.add(training, Category.USER_ANNOTATION, "Optimizer.step#Adam.step", a, a + 0.12 * rest)
        collected.add(training, Category.CPU_OP, "aten::_foreach_addcdiv_", a + 0.02 * rest, a + 0.1 * rest)
    return collected.timeline((int(found.start_ns[rows[0]]), int(found.end_ns[rows[-1]])), training)


def _gpu_timeline(found: Steps) -> Timeline:
    collected = _Spans()
    training, autograd = collected.lane("thread", 4711), collected.lane("thread", 4720)
    compute, copies = collected.lane("stream", 7, process=0), collected.lane("stream", 14, process=0)
    rows = np.flatnonzero(found.phase == Phase.TRACED)
    correlation = 0
    for i in rows:
        start, end, wait = int(found.start_ns[i]), int(found.end_ns[i]), int(found.data_wait_ns[i])
        rest = end - start - wait
        next_batch = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        collected.add(training, Category.USER_ANNOTATION, f"ProfilerStep#{i}", start, end)
        collected.add(training, Category.USER_ANNOTATION, next_batch, start, start + wait)
        copy = start + wait + 0.01 * rest
        collected.add(training, Category.CPU_OP, "aten::to", copy, copy + 0.03 * rest)
        collected.add(training, Category.CUDA_RUNTIME, "cudaMemcpyAsync", copy + 0.005 * rest, copy + 0.025 * rest)
        collected.add(
            copies, Category.GPU_MEMCPY, "Memcpy HtoD (Pinned -> Device)", copy + 0.02 * rest, copy + 0.09 * rest
        )
        for k in range(24):
            lane = training if k < 12 else autograd
            t = start + wait + (0.05 + 0.03 * k) * rest
            correlation += 1
            name = "aten::conv2d" if k % 3 == 0 else "aten::batch_norm"
            collected.add(lane, Category.CPU_OP, name, t, t + 0.027 * rest)
            collected.add(lane, Category.CPU_OP, "aten::cudnn_convolution", t + 0.002 * rest, t + 0.024 * rest)
            launch = t + 0.012 * rest
            collected.add(lane, Category.CUDA_RUNTIME, "cudaLaunchKernel", launch, launch + 0.004 * rest, correlation)
            kernel = (
                "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32"
                if k % 3 == 0
                else ("void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float>(float)")
            )
            begin = t + 0.02 * rest
            collected.add(
                compute, Category.KERNEL, kernel, begin, begin + (0.024 if k % 3 == 0 else 0.01) * rest, correlation
            )
        t = start + wait + 0.8 * rest
        collected.add(training, Category.USER_ANNOTATION, "Optimizer.step#SGD.step", t, t + 0.1 * rest)
        collected.add(compute, Category.KERNEL, "multi_tensor_apply_kernel", t + 0.03 * rest, t + 0.12 * rest)
        sync = t + 0.12 * rest
        collected.add(training, Category.CUDA_RUNTIME, "cudaStreamSynchronize", sync, sync + 0.05 * rest)
    return collected.timeline((int(found.start_ns[rows[0]]), int(found.end_ns[rows[-1]])), training)


def _series(
    name: str, unit: str, label: str, source: str, wall_ns: int, mean: float, rng: np.random.Generator
) -> Series:
    t = np.arange(20 * MS, wall_ns, max(50 * MS, wall_ns // 2000), dtype=np.int64)
    ramp = 1 - np.exp(-np.arange(len(t)) / 3)
    return Series(name, unit, label, source, t, np.clip(mean * ramp + rng.normal(0, 0.03 * mean, len(t)), 0, None))


def _cpu_samples(wall_ns: int, rng: np.random.Generator) -> Samples:
    return Samples(
        (
            _series("cpu_pct", "%", "CPU of the process and its workers", "psutil", wall_ns, 88, rng),
            _series("rss_bytes", "bytes", "memory of the process and its workers", "psutil", wall_ns, 0.8 * 2**30, rng),
        )
    )


def _gpu_samples(wall_ns: int, rng: np.random.Generator) -> Samples:
    return Samples(
        (
            _series("gpu_utilization_pct", "%", "GPU utilization", "NVML", wall_ns, 61, rng),
            _series("sm_active_fraction", "", "SM active", "NVML GPM", wall_ns, 0.31, rng),
            _series("tensor_active_fraction", "", "tensor active", "NVML GPM", wall_ns, 0.12, rng),
            _series("dram_active_fraction", "", "DRAM active", "NVML GPM", wall_ns, 0.22, rng),
            _series("gpu_memory_used_bytes", "bytes", "GPU memory used", "NVML", wall_ns, 24 * 2**30, rng),
            _series("power_w", "W", "power", "NVML", wall_ns, 310, rng),
            _series("cpu_pct", "%", "CPU of the process and its workers", "psutil", wall_ns, 180, rng),
        )
    )


def _cpu_operators() -> tuple[CostRow, ...]:
    rows = (
        ("aten::convolution_backward", 2, 4100.0, 4300.0, 0.108),
        ("aten::mkldnn_convolution", 2, 2600.0, 2650.0, 0.068),
        ("aten::max_pool2d_with_indices", 1, 520.0, 520.0, 0.0137),
        ("aten::_foreach_addcdiv_", 1, 380.0, 400.0, 0.01),
        ("aten::native_batch_norm", 2, 300.0, 310.0, 0.0079),
        ("aten::addmm", 1, 210.0, 240.0, 0.0055),
        ("aten::copy_", 7.5, 160.0, 160.0, 0.0042),
        ("aten::threshold_backward", 2, 90.0, 95.0, 0.0024),
        ("aten::_log_softmax", 1, 22.0, 23.0, 0.0006),
        ("aten::nll_loss_forward", 1, 6.5, 7.0, 0.0002),
        ("aten::detach", 40, 3.1, 4.0, 0.00008),
    )
    return tuple(CostRow(*row) for row in rows)


def _gpu_operators() -> tuple[CostRow, ...]:
    return (
        CostRow("aten::cudnn_convolution", 53, 2410.0, 2500.0, 0.2),
        CostRow("aten::convolution_backward", 53, 1100.0, 1200.0, 0.092),
        CostRow("aten::batch_norm", 53, 420.0, 900.0, 0.035),
    )


def _gpu_kernels() -> tuple[CostRow, ...]:
    return (
        CostRow(
            "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
            53,
            2410.0,
            2410.0,
            0.2,
        ),
        CostRow(
            "void at::native::(anonymous namespace)::batch_norm_collect_statistics_kernel"
            "<at::native::InvStd, float, float, float, int>(at::GenericPackedTensorAccessor<float>)",
            53,
            420.0,
            420.0,
            0.035,
        ),
        CostRow("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 3, 480.0, 480.0, 0.04),
    )
