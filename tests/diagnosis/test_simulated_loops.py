"""What gpulab says of loops on a simulated GPU, held against the truth of the model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.simulated_loops import diagnosis_of
from gpulab.analysis.breakdown import DEVICE_PARTS
from gpulab.analysis.facts import Facts, facts
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import diagnose
from gpulab.intervals import covers
from gpulab.prediction.replay import Changes, Replay, host_spans
from planted import judge
from planted.simulated.cures import CURES, without_reads
from planted.simulated.loops import LOOPS, SimulatedLoop
from planted.simulated.program import (
    COMPUTE,
    COPIES,
    SIDE,
    AwaitEvent,
    Graph,
    Item,
    Kernel,
    LoadData,
    Loop,
    Operator,
    Read,
    RecordEvent,
    Synchronize,
    Update,
    Upload,
)
from planted.simulated.record import Plan, Recorded, record
from planted.simulated.truth import steady_step_ns, truth_of

US = 1_000
PLAN = Plan(warmup=2, measured=2, traced=4, after=0)
PROFILED = Plan(warmup=2, measured=0, traced=5, after=0)  # the profiled steps stand for all
STEPS = 12  # of the model, to see what a loop takes in the long run
NODES = ("", "MmBackward0")


# -- random loops ------------------------------------------------------------------------------------------------------


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Launches of 5 to 600 kernels in a step of 2 µs to 5 ms each, and what a step does beside them."""
    count = draw(st.integers(5, 600))
    longest_us = draw(st.sampled_from([4, 20, 100, 5_000 if count < 100 else 400]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    body = _operators(random, count, longest_us, host_us=draw(st.sampled_from([5, 15, 40])))
    if draw(st.booleans()):
        body = _beside(random, body)
    if draw(st.booleans()):
        body = _in_graphs(body)
    waits: list[tuple[Item, ...]] = [
        (), (Read(),), (Read(pinned=True),), (Synchronize(),), (Read("aten::nonzero"),) * 3
    ]  # fmt: skip
    for wait in draw(st.sampled_from(waits)):
        body.insert(int(random.integers(len(body) + 1)), wait)
    before = draw(st.sampled_from([(), (LoadData(50 * US),), (LoadData(3_000 * US),), (LoadData(40_000 * US),)]))
    copies = (
        (),
        (Upload(4_000_000),),
        (Upload(4_000_000, pinned=True),),
        (Upload(40_000_000, True, True),),
        (Upload(40_000_000, True, True, COPIES), RecordEvent("batch", COPIES), AwaitEvent("batch", COMPUTE)),
    )
    update = Update((Operator("aten::_fused_adamw_", 20 * US, (Kernel("adam", 50 * US),)),), "AdamW")
    return Loop((*before, *draw(st.sampled_from(copies)), *body, update))


def _operators(random: np.random.Generator, count: int, longest_us: int, host_us: int) -> list[Item]:
    lengths = np.exp(random.uniform(np.log(2), np.log(longest_us), count))
    return [
        Operator("aten::mm", host_us * US, (Kernel(f"gemm_{i % 7}", round(us * US)),), NODES[i > count // 2])
        for i, us in enumerate(lengths)
    ]


def _beside(random: np.random.Generator, body: list[Item]) -> list[Item]:
    """With some work on a second stream, which waits for the first one and is waited for."""
    at = int(random.integers(len(body)))
    aside = Operator("aten::mul", 5 * US, (Kernel("aside", int(random.integers(2, 200)) * US, SIDE),))
    begin: list[Item] = [RecordEvent("begin"), AwaitEvent("begin", SIDE), aside, RecordEvent("end", SIDE)]
    return [*body[:at], *begin, *body[at:], AwaitEvent("end", COMPUTE)]


def _in_graphs(body: list[Item]) -> list[Item]:
    """The first half as one CUDA graph."""
    half = len(body) // 2
    first = tuple(k for item in body[:half] if isinstance(item, Operator) for k in item.kernels if k.stream == COMPUTE)
    rest = [item for item in body[:half] if not (isinstance(item, Operator) and item.kernels[0].stream == COMPUTE)]
    return [*([Graph(5 * US, first)] if first else []), *rest, *body[half:]]


def played(loop: Loop) -> tuple[Recorded, Facts]:
    recorded = record(loop, plan=PLAN)
    return recorded, facts(recorded.run)


@settings(derandomize=True, max_examples=35)
@given(loops())
def test_steps_kernels_and_idle_causes_are_those_of_the_model(loop: Loop) -> None:
    recorded, found = played(loop)
    account = found.breakdown
    assert account is not None and account.device_index == 0
    for true, step in zip(truth_of(recorded), account.steps, strict=True):
        assert (step.number, step.start_ns, step.end_ns) == (true.number, true.start_ns, true.end_ns)
        told = {part: ns for part, ns in step.parts_ns.items() if part not in DEVICE_PARTS and ns}
        unknown_ns = told.pop("unknown", 0)  # Python before a launch that follows no other row, or a wait for data
        assert unknown_ns <= 10 * US
        told["launch"] = told.get("launch", 0) + unknown_ns
        assert told == {"launch": 0} | true.idle_ns


@settings(derandomize=True, max_examples=25)
@given(loops())
def test_every_kernel_belongs_to_the_step_that_launched_it(loop: Loop) -> None:
    recorded, found = played(loop)
    work, account = found.work, found.breakdown
    assert work is not None and account is not None and found.trace is not None and found.trace.kernels is not None
    launched = work.timeline.start_ns[work.call[work.kernel]]
    for true, host in zip(truth_of(recorded), work.host_windows, strict=True):
        mine = covers(host.reshape(1, 2), launched)
        assert int(mine.sum()) == true.kernels
        assert int(work.timeline.duration_ns[work.rows[work.kernel][mine]].sum()) == true.kernel_ns
    assert found.trace.kernels.count == sum(true.kernels for true in truth_of(recorded))


@settings(derandomize=True, max_examples=25)
@given(loops())
def test_the_typical_step_is_the_long_run_step(loop: Loop) -> None:
    _, found = played(loop)
    steady_us = steady_step_ns(loop, steps=STEPS) / US
    assert found.traced_step_us is not None
    assert found.traced_step_us.median == pytest.approx(steady_us, rel=0.02, abs=20)


# -- what leaving something out would bring ----------------------------------------------------------------------------


def ratio_played(recorded: Recorded, changes: Changes) -> float:
    replay = Replay(recorded.run, 0)
    return float(np.median(replay.play(changes).step_ns) / np.median(replay.play().step_ns))


def ratio_true(loop: Loop, cured: Loop) -> float:
    return steady_step_ns(cured, steps=STEPS) / steady_step_ns(loop, steps=STEPS)


def on_one_stream(loop: Loop) -> Loop:
    """Which stream waits for which event is not in a trace: what a synchronization hides between two stays hidden."""

    def kept(item: Item) -> bool:
        aside = isinstance(item, Operator) and any(k.stream == SIDE for k in item.kernels)
        return not aside and not isinstance(item, RecordEvent | AwaitEvent)

    return replace(loop, step=tuple(item for item in loop.step if kept(item)))


@settings(derandomize=True, max_examples=25)
@given(loops())
def test_the_window_played_again_takes_as_long_as_it_did(loop: Loop) -> None:
    recorded = record(loop, plan=PLAN)
    true = [step.wall_ns for step in truth_of(recorded)]
    assert Replay(recorded.run, 0).play().step_ns.tolist() == pytest.approx(true, rel=0.002, abs=3_000)


@settings(derandomize=True, max_examples=25)
@given(loops(), st.sampled_from([1_000, 10_000, 100_000]))
def test_replay_without_data_wait_takes_as_long_as_the_loop(loop: Loop, load_us: int) -> None:
    """With two streams the wait hides which of them waits for the other: there the replay may be further off."""
    within = 0.03 if loop == on_one_stream(loop) else 0.1
    loop = replace(loop, step=(LoadData(load_us * US), *(i for i in loop.step if not isinstance(i, LoadData))))
    recorded = record(loop, plan=PLAN)
    timeline = recorded.run.timeline
    assert timeline is not None
    waits = host_spans(timeline, ["enumerate(DataLoader)"])
    cured = replace(loop, step=loop.step[1:])
    assert ratio_played(recorded, Changes(host=((waits, 0.0),))) == pytest.approx(ratio_true(loop, cured), abs=within)


@settings(derandomize=True, max_examples=25)
@given(loops(), st.integers(1, 6))
def test_replay_without_synchronizing_takes_as_long_as_the_loop(loop: Loop, count: int) -> None:
    body: list[Item] = [i for i in on_one_stream(loop).step if not isinstance(i, Read | Synchronize)]
    for n in range(count):
        body.insert((n + 1) * len(body) // (count + 1), Synchronize())
    loop = replace(loop, step=tuple(body))
    recorded = record(loop, plan=PLAN)
    timeline = recorded.run.timeline
    assert timeline is not None
    waits = np.flatnonzero(timeline.name_id == timeline.names.index("cudaDeviceSynchronize"))
    found = ratio_played(recorded, Changes(free_waits=waits))
    assert found == pytest.approx(ratio_true(loop, without_reads(loop)), abs=0.05)


# -- what is said first ------------------------------------------------------------------------------------------------

WAITING = {key: CURES[key] for key in ("data_starved", "sync_points", "blocking_copy", "launch_bound")}


@settings(derandomize=True, max_examples=35)
@given(loops())
def test_the_headline_costs_most_in_the_model(loop: Loop) -> None:
    loop = replace(
        loop, step=tuple(_plain(item) for item in loop.step if not (isinstance(item, Upload) and item.pinned))
    )
    saved = {key: 1 - ratio_true(loop, cure(loop)) for key, cure in WAITING.items()}
    first, second = sorted(saved, key=lambda key: -saved[key])[:2]
    told = diagnose(facts(record(loop, plan=PROFILED).run), predict_cures=False).first
    if saved[first] < 0.02:
        assert kind_of(told.key).is_verdict
    elif saved[first] >= 0.2 and saved[second] <= 0.5 * saved[first]:
        assert told.key == first
        alone = saved[second] <= 0.2 * saved[first]  # else its cure hides a part of the other's time, too
        step_us = steady_step_ns(loop, steps=STEPS) / US
        update_us = 30  # launching the update itself counts as the optimizer's
        assert not alone or saved[first] * step_us <= (told.recoverable_us_per_step or 0) + 0.1 * step_us + update_us


def _plain(item: Item) -> Item:
    """A read whose waiting call waits: a copying call of less than 20 µs counts as one that only starts its copy."""
    return replace(item, pinned=True) if isinstance(item, Read) else item


# Five short steps are fed from what three workers made while the profiler started: the window does not see them wait.
NOT_RIGHT = ("dlrm_slow_workers",)
SAMPLE = tuple(planted for planted in LOOPS[::9] if planted.name not in NOT_RIGHT)


@pytest.mark.parametrize("planted", SAMPLE, ids=lambda planted: planted.name)
def test_the_headline_of_a_planted_loop(planted: SimulatedLoop) -> None:
    told = judge.said(diagnosis_of(planted))
    assert told["headline"] in planted.accepted
