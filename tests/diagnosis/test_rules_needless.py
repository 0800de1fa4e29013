"""Checks for work that need not be done: each says its share where the facts and the trace prove it, else nothing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gpulab.analysis.cores import core_share
from gpulab.diagnosis import cores, needless
from gpulab.diagnosis.finding import Finding, RuleContext
from gpulab.diagnosis.no_cause import cannot_tell
from gpulab.run import BackwardPass, Category, DenseGradient, Run, Timeline, TrainingFacts
from tests.support.core_readings import with_cores
from tests.support.rule_cases import case_of, loader, run_of
from tests.support.timelines import MAIN, Span, timeline

EVALUATE = "autograd::engine::evaluate_function: "


def traced(run: Run, *parts: tuple[str, float, float]) -> Timeline:
    """In each profiled step these operators: name, from and to as shares of it."""
    spans: list[Span] = []
    for row in run.traced_rows:
        start, wall = int(run.steps.start_ns[row]), int(run.steps.wall_ns[row])
        for name, begin, end in parts:
            spans.append(Span(name, Category.CPU_OP, MAIN, start + int(begin * wall), int((end - begin) * wall)))
    return replace(timeline(spans), training_lane=MAIN)


def case(facts: TrainingFacts, *parts: tuple[str, float, float], **changed: Any) -> RuleContext:
    run = run_of(training=facts, **changed)
    return case_of(replace(run, timeline=traced(run, *parts) if parts else None))


def share(context: RuleContext, found: Finding | None) -> float:
    assert found is not None and found.recoverable_us_per_step is not None and context.step_us
    return found.recoverable_us_per_step / context.step_us


def of_cores(threads: int, got: float, others: float, **more: Any) -> RuleContext:
    run = with_cores(run_of(), got=got, others=others, **more)
    environment = replace(run.environment, compute_threads=threads)
    run = replace(run, environment=environment, timeline=traced(run, ("aten::mm", 0.0, 0.9)))
    return case_of(run, cores=core_share(run))


def test_one_thread_on_free_cores() -> None:
    context = of_cores(1, got=1.0, others=0.0)
    found = cores.idle_cores(context)
    assert share(context, found) == pytest.approx(0.45, abs=0.02)
    assert found is not None and found.settings == (("compute_threads", "2"),) and found.confidence == "likely"


@pytest.mark.parametrize(
    ("threads", "got", "others", "more"),
    [(1, 1.0, 0.6, {}), (2, 1.0, 0.0, {}), (1, 1.9, 0.0, {}), (1, 1.0, 0.0, {"quota": 1.0})],
)
def test_cores_that_are_not_free(threads: int, got: float, others: float, more: dict[str, float]) -> None:
    assert cores.idle_cores(of_cores(threads, got, others, **more)) is None


def test_short_and_serial_operators_need_no_second_thread() -> None:
    run = with_cores(run_of(), got=1.0)
    run = replace(run, environment=replace(run.environment, compute_threads=1))
    short = tuple(("aten::mm", i / 500, (i + 0.9) / 500) for i in range(500))
    for parts in (short, (("aten::sort", 0.0, 0.9),)):
        context = case_of(replace(run, timeline=traced(run, *parts)), cores=core_share(run))
        assert cores.idle_cores(context) is None


def test_anomaly_detection_by_looks_and_checks() -> None:
    facts = TrainingFacts(anomaly_detection=True, calls={"anomaly_detection": 0.7})
    node = (f"{EVALUATE}MulBackward0", 0.5, 0.8), ("aten::isnan", 0.6, 0.7), ("aten::isnan", 0.9, 1.0)
    context = case(facts, *node)
    assert share(context, needless.anomaly_detection(context)) == pytest.approx(0.8, abs=0.01)
    unknown = needless.anomaly_detection(case(replace(facts, calls={})))
    assert unknown is not None and unknown.recoverable_us_per_step is None and unknown.confidence == "possible"
    assert needless.anomaly_detection(case(replace(facts, anomaly_detection=False))) is None


def test_gradients_that_nobody_uses_where_passes_agree() -> None:
    one = BackwardPass(("MeanBackward0", "AddmmBackward0", "ReluBackward0"), (0.0, 0.5, 1.0))
    nodes = (f"{EVALUATE}MeanBackward0", 0.4, 0.5), (f"{EVALUATE}AddmmBackward0", 0.5, 0.7)
    leaf = (f"{EVALUATE}torch::autograd::AccumulateGrad", 0.7, 0.75)
    facts = TrainingFacts(passes=(one,), unheld=True)
    context = case(facts, *nodes, leaf, (f"{EVALUATE}ReluBackward0", 0.75, 0.95))
    found = needless.unused_gradients(context)
    assert (
        share(context, found) == pytest.approx(0.3, abs=0.01) and found is not None and "no optimizer" in found.summary
    )
    assert needless.unused_gradients(case(facts, *nodes, (f"{EVALUATE}TanhBackward0", 0.75, 0.95))) is None
    assert needless.unused_gradients(case(TrainingFacts(), *nodes)) is None


def test_rows_that_were_not_looked_up() -> None:
    table = DenseGradient(400_000, 0.1, 1.0)
    parts = (f"{EVALUATE}EmbeddingBackward0", 0.1, 0.4), ("Optimizer.step#Adagrad.step", 0.4, 0.9)
    context = case(TrainingFacts(dense_gradients=(table,)), *parts)
    assert share(context, needless.dense_gradients(context)) == pytest.approx(0.72, abs=0.01)
    whole = TrainingFacts(dense_gradients=(replace(table, used_fraction=1.0),))
    assert needless.dense_gradients(case(whole, *parts)) is None


def test_each_batch_from_each_worker() -> None:
    facts, of = TrainingFacts(batch_copies=2), loader(2, iterable=True)
    context = case(facts, loader=of)
    assert share(context, needless.repeated_batches(context)) == 0.5
    assert needless.repeated_batches(case(facts, loader=replace(of, num_workers=3))) is None
    assert needless.repeated_batches(case(TrainingFacts(), loader=of)) is None


def test_graphs_that_backward_passes_run_through_again() -> None:
    node = (f"{EVALUATE}MulBackward0", 0.2, 0.7)
    for facts, rule in (
        (TrainingFacts(repeated_fraction=0.8), needless.graph_kept),
        (TrainingFacts(batch_nodes_fraction=0.8), needless.batch_graph),
    ):
        context = case(facts, node)
        assert share(context, rule(context)) == pytest.approx(0.4, abs=0.01)
        assert rule(case(TrainingFacts(), node)) is None


def test_padding_takes_its_share_of_the_computing() -> None:
    for gpu in (False, True):
        facts = TrainingFacts(padding_fraction=0.5)
        context = case_of(run_of(gpu=gpu, training=facts), {"compute": 0.8})
        assert share(context, needless.padding(context)) == pytest.approx(0.4)
    assert needless.padding(case(TrainingFacts())) is None


def test_settings_that_are_left_on() -> None:
    context = case(TrainingFacts(calls={"argument_validation": 0.1}))
    assert share(context, needless.argument_validation(context)) == pytest.approx(0.1)
    context = case(TrainingFacts(calls={"recomputation": 0.2}))
    assert share(context, needless.recomputation(context)) == pytest.approx(0.2)
    context = case(TrainingFacts(emulated_fraction=1.0), ("aten::mm", 0.0, 0.8))
    assert share(context, needless.emulated_type(context)) == pytest.approx(0.8, abs=0.01)
    alone = cannot_tell(case_of(run_of(training=TrainingFacts(profiled=True)), breakdown=None))
    assert alone is not None and "Your own profiler records every step" in alone.summary
    context = case(TrainingFacts(float64_fraction=1.0), ("aten::mm", 0.0, 0.8))
    assert share(context, needless.float64(context)) == pytest.approx(0.4, abs=0.01)
    solving = ("aten::mm", 0.0, 0.8), ("aten::linalg_cholesky_ex", 0.8, 0.9)
    assert needless.float64(case(TrainingFacts(float64_fraction=1.0), *solving)) is None


def test_what_needs_a_trace_is_silent_on_a_gpu() -> None:
    every = TrainingFacts(
        calls={"argument_validation": 0.5}, passes=(BackwardPass(("A",), (1.0,)),), float64_fraction=1.0
    )
    context = case_of(run_of(gpu=True, training=every), {"compute": 1.0})
    assert [kind.key for kind in needless.FINDINGS if kind.rule is not None and kind.rule(context) is not None] == []
