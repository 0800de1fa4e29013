"""The rules of the host's side on made-up runs with one planted cause each, and on ones without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.cores import core_share
from gpulab.analysis.integrity import Check, Integrity
from gpulab.analysis.loader import LoadingFacts
from gpulab.analysis.operators import HostOperators
from gpulab.analysis.optimizer_work import OptimizerWork
from gpulab.diagnosis import cores, idle_gpu, loading
from gpulab.diagnosis import own_code as pausing
from gpulab.diagnosis.catalogue import kinds
from gpulab.diagnosis.cores import cpu_shared
from gpulab.diagnosis.diagnose import diagnose, with_predictions
from gpulab.diagnosis.finding import Finding, Rule, RuleContext, Undetermined
from gpulab.diagnosis.idle_gpu import small_batch
from gpulab.diagnosis.operations import layout
from gpulab.intervals import EMPTY
from gpulab.prediction.predict import Predictor, predict
from gpulab.prediction.prediction import NOTHING, Prediction
from gpulab.run import Category, Choice, Missing, PauseKind, Place, Run, Samples, Series, Settings, StackSamples, Steps
from gpulab.thresholds import DEFAULT
from gpulab.views.report.findings import finding_sections
from tests.support import synthetic
from tests.support.core_readings import with_cores
from tests.support.rule_cases import STEP_MS, case_of, inside, loader, pauses, run_of
from tests.support.rule_tables import UNTOLD, Answer, Case, Rows, assert_golden, check, first, table

STEP_US = STEP_MS * 1e3
Make = Callable[[], RuleContext]

# Feeding

READING = inside(read_ms=9, transform_ms=1, read_waited=0.9)
COLLATING = inside(read_ms=2, transform_ms=1, collate_ms=7)
PREPARING = inside(read_ms=2, transform_ms=7, collate_ms=1)
MIXED = inside(read_ms=4, transform_ms=2, collate_ms=4, read_waited=0.9)
CAUSES: dict[str, LoadingFacts] = {
    "cpu_preprocessing": PREPARING,
    "storage_bound": READING,
    "slow_collate": COLLATING,
}
APART = Integrity((Check("early kernels", 9, "degraded", ("idle_causes",), "the clocks are apart"),))


def waits(wait: float, loading: LoadingFacts | None = None, *, share: float | None = None, **run: Any) -> Make:
    """The loop waits for data for so much of each step; `share`: so much of it is not hidden by the GPU's work."""
    return lambda: case_of(run_of(wait=wait, **run), {"data_wait": wait if share is None else share}, loading)


def loads(loading: LoadingFacts | None = None, workers: int = 0, **changes: Any) -> Make:
    """Half of each step, by a loader with these changes."""
    run = replace(run_of(wait=0.5, workers=workers), loader=replace(loader(workers), **changes))
    return lambda: case_of(run, {"data_wait": 0.5}, loading)


def on_gpu(data_wait: float = 0.0, **changes: Any) -> Make:
    """The loop waits for 60 % of each step on a GPU."""
    shares = {"data_wait": data_wait, "compute": 0.5, "unknown": 0.5 - data_wait}
    return lambda: case_of(run_of(gpu=True, wait=0.6), shares, **changes)


def half_busy() -> RuleContext:
    every = synthetic.gpu_case().facts.curves
    curves = tuple(replace(c, step_mean=c.mean) for c in every if c.name == "gpu_utilization_pct")
    return on_gpu(breakdown=None, curves=curves)()


def named(workers: int, **parts: float) -> Make:
    """A loader whose lines are known."""
    return loads(inside(**parts), workers, items_line="items", transform_line="transform", collate_line="collate")


# The line that loads

LOADING = (
    Place("cell", 3, "Photos.__getitem__", "image = image.rotate(3)"),
    Place("cell", 4, "Photos.__getitem__", "image = image.resize((48, 48))"),
    Place("cell", 9, "", "for x, y in loader:"),
    Place("cell", 12, "", "loss.backward()"),
)


def _looked_at(run: Run, seen: Sequence[int], *, exact: bool = True) -> Run:
    """A look each millisecond of the profiled steps: within the wait, their first half, these places in turn."""
    collected = synthetic._Spans()
    training = collected.lane("thread", 4711)
    rows = np.flatnonzero(np.isin(run.steps.number, run.traced_numbers))
    looks: list[tuple[int, int]] = []
    for row in rows.tolist():
        start, end = int(run.steps.start_ns[row]), int(run.steps.end_ns[row])
        middle = start + (end - start) // 2
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        collected.add(training, Category.USER_ANNOTATION, name, start, middle)
        times = range(start + synthetic.MS, end, synthetic.MS)
        looks += [(t, seen[i % len(seen)] if t < middle else 3) for i, t in enumerate(times)]
    window = (int(run.steps.start_ns[rows[0]]), int(run.steps.end_ns[rows[-1]]))
    t, place = np.array(looks, np.int64).T
    stack = StackSamples(t, place.astype(np.int32), window[0], exact=exact)
    return replace(run, timeline=collected.timeline(window, training), stack=stack, places=LOADING)


CROSSING = inside(read_ms=2, collate_ms=2, hand_over_ms=9)


def choosing(workers: int, seen: Sequence[int] = (0,), loading: LoadingFacts = CROSSING, sampler: str = "12") -> Make:
    """Looks within the wait are at these places, of which the first is in a sampler."""

    def make() -> RuleContext:
        run = _looked_at(run_of(wait=0.5, workers=workers), seen)
        return case_of(replace(run, loader=replace(loader(workers), sampler_line=sampler)), {"data_wait": 0.5}, loading)

    return make


# Epochs, cores, and the device

EPOCHS = {0: 100.0, 20: 100.0, 40: 100.0}


def epochs(change: Callable[[Run], Run] = lambda run: run, starts: dict[int, float] = EPOCHS) -> Make:
    """Their first steps wait so many ms longer."""
    return lambda: case_of(change(run_of(epoch_starts=starts, workers=2)))


def anew(workers: int, loading: LoadingFacts | None = None, every: int = 1) -> Make:
    """Half of each step waits, and so many of them begin with a new iterator."""
    starts = dict.fromkeys(range(0, 60, every), 0.0)
    return lambda: case_of(run_of(wait=0.5, workers=workers, epoch_starts=starts), {"data_wait": 0.5}, loading)


def remade(run: Run) -> Run:
    return replace(run, loader=replace(loader(2, persistent=True), remade=True))


def unrecorded(run: Run) -> Run:
    """Fed by something that is no DataLoader of torch's, and without a trace that names one."""
    return replace(run, loader=None, timeline=None)


def loaded(pct: float, workers: int, core_wait: float) -> Make:
    run = run_of(wait=0.5, workers=workers, cores=2.0)
    t = np.arange(0, run.wall_ns, 50 * 10**6)
    run = replace(run, samples=Samples((Series("cpu_pct", "%", "CPU", "psutil", t, np.full(len(t), pct)),)))
    return lambda: case_of(run, {"data_wait": 0.5}, inside(transform_ms=10, core_wait=core_wait))


QUIET: dict[str, Any] = {"computed": 0.97, "waited": 0.02, "got": 1.0, "others": 0.1}
BUSY: dict[str, Any] = {"computed": 0.3, "waited": 0.68, "got": 0.3, "others": 1.6}
CROWD: dict[str, Any] = {"computed": 0.5, "waited": 0.5, "got": 1.9, "others": 0.1, "workers_waiting": 1.5}


def on_cores(
    threads: int = 1, workers: int = 0, data_wait: float = 0.0, loading: LoadingFacts | None = None, **readings: Any
) -> Make:
    """On a machine of two cores with these readings; the part of a step without a core is that of them."""

    def make() -> RuleContext:
        run = with_cores(run_of(workers=workers, wait=data_wait), **readings)
        run = replace(run, environment=replace(run.environment, compute_threads=threads))
        share = core_share(run)
        assert share is not None
        waited = share.thread_wait_fraction or 0.0
        return case_of(run, {"core_wait": waited, "data_wait": data_wait}, loading, cores=share)

    return make


def loading_without_a_core() -> RuleContext:
    """31.2 ms to make a batch, of which 69 % had no core."""
    run = with_cores(run_of(wait=0.9), **BUSY)
    case = case_of(run, {"data_wait": 0.9}, inside(transform_ms=31.2, core_wait=0.69), cores=core_share(run))
    return replace(case, facts=replace(case.facts, breakdown=None))


def crossing_beside_others() -> RuleContext:
    """Without its 40 % without a core, of which 20 points lie in the wait, it waits for half of its own time."""
    run = with_cores(run_of(wait=0.5, workers=2), **BUSY | {"computed": 0.5, "waited": 0.4})
    loading = inside(read_ms=2, core_wait=0.9, hand_over_ms=1e6)
    return case_of(run, {"core_wait": 0.2, "data_wait": 0.5}, loading, cores=core_share(run))


def half_on_the_cpu() -> RuleContext:
    """Half of each step computes there, and starts nothing."""
    run = synthetic.gpu_case().run
    collected = synthetic._Spans()
    training, stream = collected.lane("thread", 4711), collected.lane("stream", 7, process=0)
    rows = np.flatnonzero(np.isin(run.steps.number, run.traced_numbers))
    for k, row in enumerate(rows.tolist()):
        start, end = int(run.steps.start_ns[row]), int(run.steps.end_ns[row])
        middle = start + (end - start) // 2
        collected.add(training, Category.CPU_OP, "aten::addmm", start, middle)
        collected.add(training, Category.CUDA_RUNTIME, "cudaLaunchKernel", middle, middle + 5000, k + 1)
        collected.add(stream, Category.KERNEL, "gemm", middle + 6000, end, k + 1)
    window = (int(run.steps.start_ns[rows[0]]), int(run.steps.end_ns[rows[-1]]))
    run = replace(run, timeline=collected.timeline(window, training))
    return case_of(run, {"compute": 0.5, "launch": 0.5})


def calling(
    share: float,
    parts: dict[str, float] | None = None,
    updating_us: float = 0.0,
    *,
    fixed: float = 0.0,
    beside: float = 0.0,
    fed: bool = True,
) -> Make:
    """Calling operators takes so much of each step, so much is the same for a larger batch; an optimizer so much of
    that, and calls beside the training.
    """
    host = HostOperators(200.0, 190.0, share, fixed, beside, 0.0, 0.0, None)
    update = OptimizerWork("AdamW", None, 200.0, updating_us, 0, 0, 0, 0, 0, 0, 0, False, 0, EMPTY, EMPTY)
    run = run_of(wait=(parts or {}).get("data_wait", 0.0))
    run = run if fed else replace(run, loader=None)
    return lambda: case_of(run, parts, host=host, optimizer=update if updating_us else None)


def rearranging(share: float) -> Make:
    return lambda: case_of(run_of(), host=HostOperators(200.0, 190.0, 0.8, 0.8, 0.0, share, 24.0, None))


def threads(count: int, cores: float) -> Make:
    run = run_of(cores=cores)
    return lambda: case_of(replace(run, environment=replace(run.environment, compute_threads=count)))


# Pauses, and where nothing speaks


def paused(kind: PauseKind, rows: Iterable[int], ms: float, shares: dict[str, float] | None = None, **run: Any) -> Make:
    def make() -> RuleContext:
        quiet = run_of(**run)
        return case_of(replace(quiet, pauses=pauses(quiet, kind, [*rows], ms)), shares)

    return make


def saving() -> RuleContext:
    run = run_of()
    place = Place("cell", 7, "", "torch.save(model.state_dict(), path)")
    return case_of(replace(run, pauses=pauses(run, "checkpoint_save", range(10, 60, 10), 18.0, 0), places=(place,)))


def saving_and_collecting() -> RuleContext:
    run, rows = run_of(), range(6, 60, 6)
    return case_of(replace(run, pauses=pauses(run, "checkpoint_save", rows, 18.0) + pauses(run, "gc", rows, 18.0)))


def one_full_collection() -> RuleContext:
    run = run_of()
    often, once = pauses(run, "gc", range(5, 60, 3), 0.05), pauses(run, "gc", [30], 500.0)
    return case_of(replace(run, pauses=often + once))


def samples(count: int, gpu: bool = False, wait: float = 0.0) -> Make:
    run = run_of(gpu=gpu, wait=wait)
    run = replace(run, steps=replace(run.steps, sample_count=np.full(len(run.steps), count, np.int64)))
    return lambda: case_of(run, {"data_wait": wait} if wait else None)


def two_steps(steps: Steps | None = None) -> Make:
    run = replace(synthetic.tiny_case().run, traced_numbers=(), timeline=None, settings=Settings(trace=False))
    if steps is not None:
        return lambda: RuleContext(synthetic.facts_of(replace(run, steps=steps)), DEFAULT)
    return lambda: case_of(run, integrity=None)


def shares(**parts: float) -> Make:
    return lambda: case_of(run_of(), parts)


SECONDS = range(5, 60, 2)
HALF_PAUSED = {"compute": 0.7, "unknown": 0.3}

CASES: dict[str, Case] = table(
    Rows(
        loading.data_starved,
        {
            "11 %": (waits(0.11), 0.11 * STEP_US),
            "19 %": (waits(0.19), 0.19 * STEP_US),
            "21 %": (waits(0.21), 0.21 * STEP_US),
            "not hidden by the GPU": (waits(0.6, share=0.4, gpu=True), 0.4 * STEP_US),
            "clocks apart": (on_gpu(integrity=APART), UNTOLD),
            "without an accounting": (on_gpu(breakdown=None), UNTOLD),
            "by the GPU's utilization": (half_busy, "data_starved"),
            # ⌈time to make a batch / time to compute one⌉ + 1 workers, up to the cores
            "a fifth, 8 cores": (waits(0.2, cores=8.0), 0.2 * STEP_US),
            "three quarters, 8 cores": (waits(0.75, cores=8.0), 0.75 * STEP_US),
            "three quarters, 2 cores": (waits(0.75, cores=2.0), 0.75 * STEP_US),
            "three quarters, cores unknown": (waits(0.75, cores=None), 0.75 * STEP_US),
            "two workers, no core left": (waits(0.5, workers=2, cores=2.0), 0.5 * STEP_US),
            "two workers, 16 cores": (waits(0.5, workers=2, cores=16.0), 0.5 * STEP_US),
            "an iterable dataset": (loads(iterable=True), 0.5 * STEP_US),
        },
        {"9 %": waits(0.09), "hidden by the GPU": waits(0.6, share=0.05, gpu=True)},
    ),
    Rows(
        loading.slow_collate,
        {
            "8 cores": (waits(0.5, COLLATING, cores=8.0), 0.5 * STEP_US),
            "no core left": (waits(0.5, COLLATING, workers=2, cores=2.0), 0.5 * STEP_US),
            "cores unknown": (waits(0.5, COLLATING, cores=None), 0.5 * STEP_US),
            "by a function of the user's": (loads(COLLATING, own_collate=True), 0.5 * STEP_US),
            "by PyTorch": (loads(COLLATING, own_collate=False), 0.5 * STEP_US),
            "of an iterable dataset": (loads(COLLATING, iterable=True), 0.5 * STEP_US),
            "its line": (named(2, read_ms=1.0, collate_ms=8.0), 0.5 * STEP_US),
        },
    ),
    Rows(
        loading.cpu_preprocessing,
        {
            "the line of items": (named(2, read_ms=9.0), 0.5 * STEP_US),
            "the line of the transform": (named(2, read_ms=1.0, transform_ms=8.0), 0.5 * STEP_US),
            "the line of items, without workers": (named(0, read_ms=9.0), 0.5 * STEP_US),
            "32 items of 19 µs": (loads(inside(read_ms=0.4, collate_ms=0.2)), 0.5 * STEP_US),
        },
    ),
    Rows(
        loading.storage_bound,  # workers that wait need no core
        {"two workers, no core left": (waits(0.75, READING, workers=2, cores=2.0), 0.75 * STEP_US)},
    ),
    Rows(
        loading.slow_hand_over,
        {
            "449 tensors": (loads(CROSSING, 2, batch_tensors=449), 0.5 * STEP_US),
            "2 tensors": (loads(CROSSING, 2, batch_tensors=2), 0.5 * STEP_US),
        },
        {
            "made while the loop waits": loads(inside(read_ms=9, hand_over_ms=0.5), 2, batch_tensors=449),
            "no workers": loads(CROSSING, 0, batch_tensors=2),
            "workers that are busy": loads(inside(read_ms=30, hand_over_ms=9), 2, batch_tensors=449),
            "hardly a wait": waits(0.05, CROSSING, workers=2),
            "a sampler's": choosing(2),
        },
    ),
    Rows(
        loading.slow_sampler,
        {
            "with workers": (choosing(2), 0.5 * STEP_US),
            "without": (choosing(0), 0.5 * STEP_US),
        },
        {
            "at the line that asks": choosing(2, (2,)),
            "a library's sampler": choosing(2, sampler=""),
            "made while the loop waits": choosing(2, loading=inside(read_ms=9, hand_over_ms=0.5)),
        },
    ),
    Rows(
        loading.new_iterators,
        {
            "workers": (anew(2), 0.5 * STEP_US),
            "without workers": (anew(0, inside(read_ms=1)), 9_000.0),
        },
        {
            "each second step": anew(2, every=2),
            "batches that take the time": anew(2, inside(read_ms=9)),
        },
    ),
    Rows(
        loading.worker_restart,
        {
            "three epochs": (epochs(), 2 * 100e3 / 60),  # not the first start
            "whose batches take 10 ms": (
                lambda: case_of(run_of(epoch_starts=EPOCHS, workers=2), loading=inside(read_ms=10)),
                2 * 90e3 / 60,
            ),
            "a loader made anew": (epochs(remade), 2 * 100e3 / 60),
            "a loader that is not recorded": (epochs(unrecorded), UNTOLD),
        },
        {
            "no workers": epochs(lambda run: replace(run, loader=loader(0))),
            "workers that stay": epochs(lambda run: replace(run, loader=loader(2, persistent=True))),
            "no loader": epochs(lambda run: replace(run, loader=None)),
            "one epoch": epochs(starts={0: 500.0}),  # workers are started once in any case
            "5 ms in 60 steps of 20 ms": epochs(starts={0: 100.0, 30: 5.0}),
            "not recorded, one epoch": epochs(unrecorded, {0: 500.0}),
            "not recorded, no wait": epochs(unrecorded, {0: 100.0, 20: 0.0, 40: 0.0}),
        },
    ),
    Rows(
        cores.cpu_oversubscribed,
        {
            "more of its own than cores": (on_cores(2, 4, **CROWD), "cpu_oversubscribed"),
            "4 threads, 2 cores": (threads(4, 2.0), "cpu_oversubscribed"),
            "8 threads, 1.5 cores": (threads(8, 1.5), "cpu_oversubscribed"),
        },
        {
            "2 threads, 2 cores": threads(2, 2.0),
            "2 threads, 1.5 cores": threads(2, 1.5),
            "cores that are free": loaded(60.0, 8, 0.7),
            "batches that have a core": loaded(99.0, 8, 0.05),
            "two workers": loaded(99.0, 2, 0.3),
        },
    ),
    Rows(
        cpu_shared,
        {
            "other programs": (on_cores(**BUSY), 0.68 * STEP_US),
            "a quota": (
                on_cores(**BUSY | {"others": 0.0, "throttled": 0.8, "cores": 8, "quota": 1.5}),
                0.68 * STEP_US,
            ),
            "threads that wait": (on_cores(2, **BUSY | {"pool_waiting": 0.7}), "cpu_shared"),
            "loading as well": (
                on_cores(1, 2, 0.3, inside(transform_ms=10, core_wait=0.5), **BUSY | {"computed": 0.02}),
                (0.68 + 0.3 / 2) * STEP_US,
            ),
            "its other thread alone": (on_cores(2, **QUIET | {"others": 1.0, "pool_waiting": 0.9}), "cpu_shared"),
            "threads that hardly compute": (
                on_cores(2, 1, data_wait=0.799, **BUSY | {"computed": 0.001, "waited": 0.2, "pool_waiting": 0.9}),
                0.2 * STEP_US,
            ),
        },
        {
            "a quiet machine": on_cores(**QUIET),
            "short turns, and nobody else": on_cores(**QUIET | {"waited": 0.12}),
            "its own threads": on_cores(2, 4, **CROWD),
        },
    ),
    Rows(
        small_batch,
        {
            "fixed, 80 %": (calling(0.1, {"unknown": 0.3}, fixed=0.8), 0.8 * STEP_US),
            "a call takes half of it": (calling(0.1, fixed=0.8, beside=0.4), 0.4 * STEP_US),
            "no batches, calling, 26 %": (calling(0.26, fixed=0.9, fed=False), 0.26 * STEP_US),
        },
        {
            "fixed, 49 %": calling(0.4, fixed=0.49),
            "no batches, calling, 24 %": calling(0.24, fixed=0.9, fed=False),
            "a call takes most of it": calling(0.1, fixed=0.8, beside=0.7),
            "waiting is more": calling(0.1, {"data_wait": 0.85}, fixed=0.8),
            "most of it is the optimizer's": calling(0.1, updating_us=15_000.0, fixed=0.8),
            "no operators": lambda: case_of(run_of(), host=None),
        },
    ),
    Rows(layout, {"rearranging, 11 %": (rearranging(0.11), 0.11 * STEP_US)}, {"rearranging, 9 %": rearranging(0.09)}),
    Rows(
        idle_gpu.wrong_device,
        {"half of the model": (half_on_the_cpu, "wrong_device")},
        {"all on the GPU": lambda: case_of(synthetic.gpu_case().run, {"compute": 0.5, "launch": 0.5})},
    ),
    Rows(pausing.checkpoint_save, {"its line": (saving, 5 * 18e3 / 55)}),  # 55 steps after the warm-up
    Rows(
        pausing.logging_or_eval,
        {
            "evaluation in every second step": (paused("evaluation", SECONDS, 12.0), 6e3, 0.1),
            "logging": (paused("logging", range(60), 6.0, HALF_PAUSED), 6e3),
            "callbacks": (paused("callback", range(60), 6.0, HALF_PAUSED), 6e3),
            "evaluation": (paused("evaluation", range(60), 6.0, HALF_PAUSED), 6e3),
        },
    ),
    Rows(
        first,
        {
            **{f"{key} is the cause": (waits(0.5, facts), 0.5 * STEP_US) for key, facts in CAUSES.items()},
            "a mixture": (waits(0.5, MIXED), "data_starved"),
            **{f"{key} without a wait": (waits(0.02, facts), "healthy") for key, facts in CAUSES.items()},
            "a GPU that was not used": (
                lambda: case_of(run_of(choices=(Choice("device", "CPU", "the traced steps made no CUDA call"),))),
                "wrong_device",
            ),
            "loading without a core": (loading_without_a_core, "cpu_preprocessing"),
            "crossing beside other programs": (crossing_beside_others, "slow_hand_over"),
            "computing beside other programs": (on_cores(**BUSY), "cpu_shared"),
            "a quiet machine": (on_cores(2, **QUIET), "healthy"),
            "turns of its own threads": (on_cores(2, computed=0.86, waited=0.12, got=1.2, others=0.0), "healthy"),
            "time without CPU": (on_cores(computed=0.14, waited=None, got=0.14, others=1.8), "cannot_tell"),
            "CPU time by another system": (on_cores(2, computed=0.97, waited=None, got=1.0, others=0.1), "healthy"),
            "a GPU's wait that is not known": (on_gpu(breakdown=None), "cannot_tell"),
            "garbage in 5 %": (paused("gc", range(5, 60), 1.1, {"compute": 0.9, "unknown": 0.1}), "gc_pause"),
            "garbage in 4 %": (paused("gc", range(5, 60), 0.8, {"compute": 0.9, "unknown": 0.1}), "healthy"),
            "one full collection": (one_full_collection, "healthy"),
            "evaluation in a third": (paused("evaluation", range(9, 60, 10), 60.0), "logging_or_eval"),
            "evaluation in a tenth": (paused("evaluation", [20, 40], 60.0), "healthy"),
            "compiled again": (paused("compile", range(10, 60, 5), 15.0), "recompilation"),
            "compiled in the warm-up": (paused("compile", [0, 1, 2], 200.0), "healthy"),
            "saved often": (paused("checkpoint_save", range(8, 60, 8), 30.0), "checkpoint_save"),
            "saved once": (paused("checkpoint_save", [30], 200.0), "healthy"),
            "saved in no time": (paused("checkpoint_save", [20, 40], 5.0), "healthy"),
            "saving collects garbage": (saving_and_collecting, "checkpoint_save"),
            **{f"batches of {n}": (samples(n), "cannot_tell") for n in (1, 2)},
            **{f"batches of {n}, on a GPU": (samples(n, gpu=True), "cannot_tell") for n in (1, 2)},
            **{f"batches of {n}": (samples(n), "healthy") for n in (3, 64, -1)},
            "batches of 1 that are waited for": (samples(1, wait=0.5), "data_starved"),
            "two steps": (two_steps(), "cannot_tell"),
            "no step": (two_steps(Steps.empty()), "cannot_tell"),
            "all computes": (shares(), "healthy"),
            "a tenth unknown": (shares(unknown=0.1), "healthy"),
            "16 % unknown": (shares(unknown=0.16), "cannot_tell"),
            "half unknown": (shares(unknown=0.5), "cannot_tell"),
            "little besides": (shares(other=0.05, unknown=0.04, memset=0.0, optimizer=0.05), "healthy"),
            "much besides": (shares(other=0.07, unknown=0.14, memset=0.0, optimizer=0.12), "cannot_tell"),
        },
    ),
)


@cache
def answer(name: str) -> Answer:
    return check(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_a_rule_speaks_where_its_cause_is_and_only_there(name: str) -> None:
    answer(name)


def test_what_is_said_is_the_golden_text() -> None:
    assert_golden("findings_host", {name: answer(name) for name in CASES})


def finding(name: str) -> Finding:
    told = answer(name)
    assert isinstance(told, Finding)
    return told


@pytest.mark.parametrize("waited", [0.12, 0.4, 0.9])
@pytest.mark.parametrize("others", [None, 0.0, 0.5, 1.9])
def test_no_green_verdict_on_steps_without_a_core(waited: float, others: float | None) -> None:
    assert first(on_cores(computed=1 - waited, waited=waited, got=1 - waited, others=others)()).level != "good"


def test_shares_are_of_own_time_beside_other_programs() -> None:
    """Every view shows the step as it was; the causes go by the time in which the process had a core."""
    facts = crossing_beside_others().facts
    told = diagnose(facts)
    assert facts.shares is not None and facts.shares.share["core_wait"] > 0.2
    assert told.first.key == "slow_hand_over" and told.findings[-1].key == "cpu_shared"
    wait, missed = facts.shares.share["data_wait"], 0.4 - facts.shares.share["core_wait"]
    assert told.first.recoverable_us_per_step == pytest.approx((wait - missed) / 0.6 * STEP_US, rel=0.01)
    assert told.findings[-1].summary in told.alarm and "own time" in told.alarm
    assert not diagnose(on_cores(**BUSY)().facts).alarm, "the headline says it"


def test_with_clocks_apart_the_loop_waits_as_long_as_it_does() -> None:
    apart, together = on_gpu(integrity=APART)(), waits(0.6, share=0.02, gpu=True)()
    assert apart.loop_waits == pytest.approx(0.6) and apart.starves
    assert together.loop_waits == pytest.approx(0.02) and not together.starves


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        ([0], LOADING[0]),
        ([0, 0, 1], LOADING[0]),
        ([0, 1, 0, 1, 1, 2, 2], None),  # four, three and two of nine: no line takes half
        ([0, 2, 2], LOADING[2]),
        ([-1], None),
        ([0, -1, -1], None),
    ],
)
@pytest.mark.parametrize("key", [*CAUSES, "data_starved"])
def test_the_line_that_loads_is_named(key: str, seen: list[int], line: Place | None) -> None:
    case = case_of(_looked_at(run_of(wait=0.5), seen), {"data_wait": 0.5}, CAUSES.get(key))
    told = getattr(loading, key)(case)
    assert isinstance(told, Finding) and told.source_line == ("" if line is None else str(line))


@pytest.mark.parametrize(("workers", "exact"), [(0, False), (2, True)])
def test_who_does_not_see_the_loading_names_no_line(workers: int, exact: bool) -> None:
    """A thread of ours sees it where it calls PyTorch; the training thread does not see what workers do."""
    run = _looked_at(run_of(wait=0.5, workers=workers), [0], exact=exact)
    told = loading.data_starved(case_of(run, {"data_wait": 0.5}))
    assert isinstance(told, Finding) and told.source_line == ""


def test_what_was_not_timed_inside_is_untold() -> None:
    lacking = (Missing("times inside the DataLoader", "the dataset cannot be wrapped", key="workers_inside"),)
    untold = diagnose(waits(0.5, missing=lacking)().facts).untold
    assert {u.key for u in untold} >= set(CAUSES)
    assert {u.record for u in untold if u.key in CAUSES} == {"It was not timed: the dataset cannot be wrapped"}
    for case in (waits(0.5, MIXED)(), waits(0.02, READING)()):
        assert not [u for u in diagnose(case.facts).untold if u.key in CAUSES]


@pytest.mark.parametrize(
    ("ratio", "interval", "only_sign", "kept"),
    [
        (0.6, (0.5, 0.7), False, True),
        (1.0, (0.9, 1.1), False, False),
        (1.5, (0.9, 2.0), False, False),  # likely slower
        (0.9, (0.7, 1.2), False, True),  # likely faster
        (0.99, (0.5, 1.5), True, True),  # nothing but a range is known
        (None, None, False, True),
    ],
)
def test_a_setting_predicted_to_bring_nothing_is_not_advised(
    monkeypatch: pytest.MonkeyPatch,
    ratio: float | None,
    interval: tuple[float, float] | None,
    only_sign: bool,
    kept: bool,
) -> None:
    predicted = Prediction({"workers": "4"}, ratio, interval, "", only_sign=only_sign)
    monkeypatch.setattr(Predictor, "of", lambda *_: predicted)
    case = waits(0.5)()
    starved, collating = finding("data_starved: a fifth, 8 cores"), finding("slow_collate: 8 cores")
    own = replace(starved, cure="One thread each.", otherwise="")
    left = with_predictions(case.facts, [starved, collating, own], STEP_US, NOTHING)
    assert all((f.settings != ()) is kept and (f.prediction is not None) is kept for f in left)
    without = (starved.otherwise, collating.otherwise, own.cure)
    assert [f.cure for f in left] == ([starved.cure, collating.cure, own.cure] if kept else [*without])


@pytest.mark.parametrize(
    ("part", "us", "left_us"),
    [
        ("optimizer", 10_000.0, 4_000.0),  # 0.9 of the step in the middle, 0.8 at best: of 20 ms
        ("optimizer", 4_200.0, 4_000.0),
        ("optimizer", 1_000.0, 1_000.0),
        ("data_wait", 10_000.0, 10_000.0),  # workers are but one cure of it
    ],
)
def test_a_cure_gives_back_no_more_than_is_predicted(
    monkeypatch: pytest.MonkeyPatch, part: str, us: float, left_us: float
) -> None:
    predicted = Prediction({}, 0.9, (0.8, 1.0), "made up")
    monkeypatch.setattr(Predictor, "of", lambda *_: predicted)
    own = Finding("any", "", (), us, "measured", (part,), (("fused_optimizer", "True"),))
    [left] = with_predictions(case_of(run_of()).facts, [own], STEP_US, NOTHING)
    assert left.recoverable_us_per_step == pytest.approx(left_us)
    words = [evidence.words for evidence in left.evidence]  # hardly less needs no word
    assert bool(words) is (us - left_us > 1_000) and all("10.0 ms per step at most 4.00 ms" in w for w in words)


def test_without_steps_nothing_is_predicted() -> None:
    own = Finding("any", "", (), 1_000.0, "measured", ("launch",))
    [left] = with_predictions(synthetic.no_step_case().facts, [own], None, NOTHING)
    assert left.prediction is None


def test_time_between_steps_is_not_bounded_by_what_a_step_takes() -> None:
    case = epochs(starts={0: 900.0, 20: 900.0, 40: 900.0})()
    own = loading.worker_restart(case)
    assert isinstance(own, Finding)
    [bound] = with_predictions(case.facts, [own], STEP_US, NOTHING)
    assert own.recoverable_us_per_step == bound.recoverable_us_per_step == pytest.approx(30e3, rel=1e-3)
    assert bound.prediction is not None and not any("hidden" in e.words for e in bound.evidence)


def test_workers_of_a_loader_that_is_made_anew_cannot_stay() -> None:
    assert "new DataLoader each epoch" in predict(epochs(remade)().facts, {"persistent_workers": "on"}).refused


def test_a_minor_cause_is_named_as_the_next() -> None:
    fed, starved = paused("evaluation", SECONDS, 5.0), {"data_wait": 0.6, "compute": 0.4}  # 13 % of the time
    assert diagnose(fed().facts).of("logging_or_eval") is None
    beside = diagnose(paused("evaluation", SECONDS, 5.0, starved, wait=0.5)().facts, predict_cures=False)
    assert [f.key for f in beside.findings] == ["data_starved", "logging_or_eval"]
    assert "Then evaluation:" in beside.first.after
    less = diagnose(paused("evaluation", range(5, 60, 9), 4.0, starved, wait=0.5)().facts)
    assert less.of("logging_or_eval") is None


def test_a_pause_in_every_step_is_a_part_of_the_typical_step() -> None:
    result = diagnose(paused("logging", range(60), 6.0, HALF_PAUSED)().facts, predict_cures=False)
    assert result.total_us == pytest.approx(STEP_US, rel=0.01)
    assert finding_sections(result, below_headline=True)[0].title == "1. Logging"


def test_a_trace_from_elsewhere_does_not_name_pauses() -> None:
    untold = {u.key for u in diagnose(case_of(run_of(source="trace"), HALF_PAUSED).facts).untold}
    assert {"checkpoint_save", "gc_pause", "recompilation", "logging_or_eval"} <= untold
    assert diagnose(case_of(run_of()).facts).untold == ()


@pytest.mark.parametrize("rule", [k.rule for k in kinds() if k.rule is not None], ids=lambda rule: rule.__name__)
def test_no_rule_fails_where_little_is_known(rule: Rule) -> None:
    bare = replace(run_of(), steps=Steps.empty(), loader=None, timeline=None, samples=Samples(), traced_numbers=())
    facts = replace(synthetic.facts_of(bare), curves=())
    for known in (facts, synthetic.tiny_case().facts, synthetic.no_step_case().facts, synthetic.no_trace_case().facts):
        answer = rule(RuleContext(known, DEFAULT))
        assert answer is None or isinstance(answer, Finding | Undetermined)
