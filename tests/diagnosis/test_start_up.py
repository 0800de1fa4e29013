"""First calls inside the profiled window: a cause of their own with its duration, and in nobody else's share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpulab.analysis.breakdown import DEVICE_PARTS
from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis.diagnose import diagnose
from gpulab.diagnosis.finding import Diagnosis
from gpulab.intervals import measure
from gpulab.run import Category
from gpulab.timeline.trace_steps import find_steps, start_up
from gpulab.trace.load import load_run
from gpulab.views.report.sections import sections
from tests.support.loops import Machine
from tests.support.real_traces import path
from tests.support.timelines import MAIN, Span, timeline

KERNEL = "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nn"
S = 1_000_000


def convolution(machine: Machine) -> None:
    machine.operator("aten::cudnn_convolution", KERNEL, 100, host_us=12 * S)


def first_calls(*calls: tuple[str, float]) -> Callable[[Machine], None]:
    def start(machine: Machine) -> None:
        for name, us in calls:
            machine.call(name, us)

    return start


STARTS = {  # by how many seconds it takes
    12: convolution,
    30: first_calls(("cudaMalloc", 30 * S)),
    9.5: first_calls(("cudaFree", 6 * S), ("cudaLaunchKernel", 3 * S), ("cudaFree", 0.5 * S)),
    5: first_calls(("hipModuleLoad", 4 * S), ("hipMalloc", 1 * S)),
}


def starved(machine: Machine) -> None:
    """A step of 100 ms that waits for data for 60 of them."""
    machine.load(60_000)
    for _ in range(40):
        machine.operator("aten::cudnn_convolution", KERNEL, 1_000)
    machine.host = max(machine.host, machine.free)
    machine.end_step()


def recorded(start: Callable[[Machine], None] | None, steps: int = 6) -> Facts:
    machine = Machine()
    if start is not None:
        start(machine)
    for _ in range(steps):
        starved(machine)
    return machine.facts()


def diagnosed(known: Facts) -> Diagnosis:
    return diagnose(known, predict_cures=False)


@pytest.mark.parametrize("took_s", STARTS)
def test_it_is_told_with_its_duration(took_s: float) -> None:
    first = diagnosed(recorded(STARTS[took_s])).first
    assert first.key == "start_up" and "starting up, once" in first.summary
    assert first.once_us == pytest.approx(took_s * S, rel=0.01) and first.recoverable_us_per_step is None
    assert "schedule(wait=1, warmup=3" in first.cure


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("steps", [1, 6])
def test_other_causes_have_the_shares_of_a_window_without_it(start: float, steps: int) -> None:
    found, without = recorded(STARTS[start], steps), recorded(None, steps)
    assert found.breakdown is not None and without.breakdown is not None
    assert found.breakdown.share == pytest.approx(without.breakdown.share, abs=0.01)
    assert found.data_wait_fraction == pytest.approx(0.6, abs=0.01)
    mine, other = diagnosed(found).of("data_starved"), diagnosed(without).of("data_starved")
    assert mine is not None and other is not None and mine.summary == other.summary
    assert mine.recoverable_us_per_step == pytest.approx(other.recoverable_us_per_step, rel=0.01)


def test_the_parts_sum_to_the_step_and_the_shares_to_one() -> None:
    account = recorded(convolution).breakdown
    assert account is not None and sum(account.share.values()) == pytest.approx(1) and account.share["start_up"] == 0
    for step in account.steps:
        assert sum(step.parts_ns.values()) == step.end_ns - step.start_ns
    assert [step.parts_ns["start_up"] > 0 for step in account.steps] == [True] + [False] * 5
    text = " ".join(line for section in sections(recorded(convolution)) for line in section.lines)
    assert "Starting up took 12.0 s, once: it is in none of these shares." in text


def test_a_short_start_is_no_finding_and_in_no_share() -> None:
    found = recorded(first_calls(("cudaMalloc", 0.15 * S)), steps=20)
    assert found.breakdown is not None and found.breakdown.start_up_ns == pytest.approx(0.15e9, rel=0.01)
    assert diagnosed(found).of("start_up") is None and diagnosed(found).first.key == "data_starved"


@pytest.mark.parametrize(
    "slow",
    [
        *(first_calls((name, 200_000)) for name in ("cudaMalloc", "cudaStreamSynchronize", "cudaMemcpyAsync")),
        lambda machine: machine.operator("aten::mm", KERNEL, 100, host_us=300_000),
        lambda machine: machine.operator("aten::linalg_svd", host_us=300_000),  # on the CPU
    ],
)
def test_what_every_step_has_is_no_start(slow: Callable[[Machine], None]) -> None:
    machine = Machine()
    for _ in range(6):
        slow(machine)
        starved(machine)
    account = machine.facts().breakdown
    assert account is not None and account.start_up_ns == 0


def played(first_ms: tuple[float, ...], rounds: int) -> Machine:
    """Operators of 50 µs, each of which first takes so long; a kernel of the user's own likewise."""
    machine = Machine()
    for number in range(rounds):
        for i, ms in enumerate(first_ms):
            machine.operator(f"aten::op{i}", f"kernel_{i}", 20, host_us=50 if number else ms * 1_000)
        machine.call("cuLaunchKernelEx", 8 if number else 3_000)
    return machine


@pytest.mark.parametrize(("first_ms", "start_ms"), [((25, 20, 17, 5, 5), 75), ((2.2,), 5.2), ((0.06, 0.05), 3)])
def test_first_calls_are_short_beside_later_ones(first_ms: tuple[float, ...], start_ms: float) -> None:
    start = start_up(timeline(played(first_ms, 5).spans), 0)
    assert measure(start.times) / 1e6 == pytest.approx(start_ms, abs=0.1 * start_ms)
    assert sum(ns for _, ns in start.calls) == measure(start.times)  # no time has two names


def test_the_rest_of_a_window_is_no_cause() -> None:
    machine = played((25, 20, 17, 5, 5), 5)
    known = machine.facts()  # without any step
    assert known.breakdown is not None and known.breakdown.whole_window
    said = diagnosed(known)
    assert [finding.key for finding in said.findings] == ["start_up"] and "first calls" in said.first.summary


@pytest.mark.parametrize("slow", [3, 6, 9])
def test_a_call_that_is_long_again_later_is_no_start(slow: int) -> None:
    machine = Machine()
    for number in range(10):
        machine.operator("aten::mm", KERNEL, 20, host_us=9_000 if number in (0, slow) else 50)
    assert start_up(timeline(machine.spans), 0).calls == () or slow < 5


@pytest.mark.parametrize("before", [False, True])
def test_the_only_batch_of_a_trace_is_not_each_step(before: bool) -> None:
    """Workers start in it where no work came before."""
    machine = Machine()
    if before:
        machine.operator("aten::cudnn_convolution", KERNEL, 100)
    begin = machine.host
    machine.python(5 * S)
    machine.mark("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", begin)
    for _ in range(40):
        machine.operator("aten::cudnn_convolution", KERNEL, 1_000)
    machine.python(3 * S)
    machine.operator("aten::cudnn_convolution", KERNEL, 1_000)
    known = machine.facts()  # without any step
    first = diagnosed(known).first
    words = " ".join((first.summary, first.cure, *(evidence.words for evidence in first.evidence)))
    assert "each step" not in words and "of each" not in words and "5.00 s of 8.0" in words
    assert (first.key, first.confidence) == (("data_starved", "likely") if before else ("start_up", "measured"))
    assert ("record several" in words) == before and ("more workers" in words) == before


def fetches(waits_ms: list[int], workers: str, first_number: int) -> list[Span]:
    spans, at = [], 0
    for number, wait_ms in enumerate(waits_ms, start=first_number):
        name = f"enumerate(DataLoader)#_{workers}DataLoaderIter.__next__"
        begin, wait = at, wait_ms * 1_000_000
        spans.append(Span(name, Category.USER_ANNOTATION, MAIN, at, wait))
        spans.append(Span("aten::mm", Category.CPU_OP, MAIN, at + wait, 50_000_000))
        at += wait + 50_000_000
        spans.append(Span(f"ProfilerStep#{number}", Category.USER_ANNOTATION, MAIN, begin, at - begin))
    return spans


@pytest.mark.parametrize(
    ("waits_ms", "workers", "first_number", "start_ms"),
    [
        ([2000, 1, 1, 1], "MultiProcessing", 0, 2000),
        ([2000, 1, 1, 1], "MultiProcessing", 10, 0),  # not the loop's first step: a burst
        ([2000, 1, 1, 1800], "MultiProcessing", 0, 0),  # it comes again
        ([2000, 1, 1, 1], "SingleProcess", 0, 0),
        ([2000], "MultiProcessing", 0, 2000),
        ([2000], "MultiProcessing", 10, 0),
    ],
)
def test_workers_start_once(waits_ms: list[int], workers: str, first_number: int, start_ms: int) -> None:
    spans = timeline(fetches(waits_ms, workers, first_number))
    waited_ms = find_steps(spans).steps.data_wait_ns.sum() / 1e6
    assert waited_ms == sum(waits_ms) - start_ms


def test_a_real_start_up() -> None:
    """a100_alexnet_sync_events: 29.9 s in one call, 6.5 s in cudaFree, 3.1 s in the first launch, …"""
    found = facts(load_run(path("a100_alexnet_sync_events")))
    first = diagnosed(found).first
    assert first.key == "start_up" and first.once_us == pytest.approx(42.6e6, rel=0.001)
    account = found.breakdown
    assert account is not None and account.typical_share(*DEVICE_PARTS) > 0.05
