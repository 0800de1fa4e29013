"""The models that are turned by hand: against formulas, closed forms and what cannot be."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.lessons.figures import ByHand, png
from gpulab.lessons.lanes import (
    WAYS,
    Block,
    Exchange,
    GpuStep,
    Kind,
    Loading,
    Model,
    Sharing,
    all_reduce_ms,
    draw,
    draw_lanes,
    turn,
)
from gpulab.lessons.pipeline import (
    BACKWARD_MS,
    FORWARD_MS,
    SCHEDULES,
    Operation,
    Order,
    Pipeline,
    Schedule,
    StagesWait,
    bubble,
    draw_orders,
    gpipe,
    one_forward_one_backward,
    play_orders,
)

WAITS = {"training": [Block(0, 1, "wait"), Block(1, 1, "compute")]}


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


@pytest.mark.parametrize(
    ("unit", "meanings", "legend"),
    [
        ("ms", None, ["computing", "waiting"]),
        ("seconds", None, []),
        ("seconds", {"wait": "a slow trial", "load": "not there"}, ["a slow trial"]),
        ("ms", {}, []),
    ],
)
def test_the_legend_has_the_colours_of_the_lanes(
    unit: str, meanings: Mapping[Kind, str] | None, legend: list[str]
) -> None:
    assert legend_of(draw_lanes(WAITS, "a step", unit=unit, meanings=meanings)) == legend


def test_without_workers_nothing_waits() -> None:
    assert legend_of(draw(Loading(workers=0), "alone")) == ["computing", "loading a batch"]


@pytest.mark.parametrize(
    ("model", "title"),
    [
        (GpuStep(), "two steps of 200 µs"),
        (Sharing(), "time slicing, 2 jobs: 2.0 times one alone; each at 100 % speed"),
        (Exchange(buckets=4), "4 buckets: a step of 102 ms, 12 ms of it exposed"),
        (Pipeline(), "GPipe: bubble 43 %; stage 1 keeps 4 micro-batches"),
        (Loading(), "2 workers: 15 ms per step, the device computes 67 % of it"),
    ],
)
def test_a_model_is_named_so_and_has_a_static_twin(model: Model, title: str) -> None:
    drawn = draw(model)
    assert "a model, not a measurement" in [text.get_text() for text in drawn.axes[0].texts]
    assert title in drawn.axes[0].get_title(loc="left")
    turned = turn(model)
    assert isinstance(turned, ByHand)
    bundle = turned._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == png(drawn), "what a reader without a kernel sees"
    assert "application/vnd.jupyter.widget-view+json" in bundle and "interactive(" not in bundle["text/plain"]
    assert len([child for child in turned.sliders.children if hasattr(child, "description")]) >= 2
    for widget in (*turned.sliders.children, turned.sliders):
        widget.close()


@pytest.mark.parametrize(
    ("model", "wrong", "words"),
    [
        (GpuStep, [{"kernels": 0}], "at least one kernel"),
        (Sharing, [{"jobs": 0}, {"busy_pct": 0}, {"fills_pct": 101}, {"way": "luck"}], "at least one job"),
        (Exchange, [{"buckets": 0}, {"mb_per_s": 0.0}, {"latency_ms": -1.0}], r"bucket|negative"),
        (Pipeline, [{"stages": 0}, {"micro_batches": 0}, {"slowest": 0.0}], "at least one stage"),
    ],
)
def test_no_model_of_what_cannot_be(model: Callable[..., object], wrong: list[dict[str, Any]], words: str) -> None:
    for values in wrong:
        with pytest.raises(ValueError, match=words):
            model(**values)


# -- a step on a GPU ---------------------------------------------------------------------------------------------------

times_us = st.floats(0.5, 100)
STEPS = st.builds(
    GpuStep,
    kernels=st.integers(1, 30),
    kernel_us=times_us,
    launch_us=times_us,
    syncs=st.integers(0, 6),
    data_us=st.just(0.0) | times_us,
    graph=st.booleans(),
    steps=st.just(3),
)


@given(STEPS)
def test_nothing_overlaps_and_nothing_runs_before_its_launch(step: GpuStep) -> None:
    played = step.play()
    for lane in played.lanes.values():
        for before, after in pairwise(lane):
            assert after.start >= before.end - 1e-6
    device = played.lanes["device"]
    assert len(device) == 3 * step.kernels
    assert 0 <= played.share("compute", "device") <= 1 + 1e-9
    if not step.graph:
        launches = [block.end for block in played.lanes["host"] if block.kind == "launch"]
        assert all(k.start >= launch - 1e-6 for k, launch in zip(device, launches, strict=True))


@given(st.integers(1, 40), times_us, times_us)
def test_a_settled_step_is_the_slower_of_both(kernels: int, kernel_us: float, launch_us: float) -> None:
    played = GpuStep(kernels, kernel_us, launch_us, steps=40).play()
    assert played.step == pytest.approx(kernels * max(kernel_us, launch_us), rel=1e-6)


@settings(deadline=None)
@given(STEPS)
def test_more_of_anything_never_makes_a_step_shorter(step: GpuStep) -> None:
    def end(step: GpuStep) -> float:
        return max(block.end for lane in step.play().lanes.values() for block in lane)

    for name in ("kernel_us", "launch_us", "data_us"):
        assert end(replace(step, **{name: getattr(step, name) + 3})) >= end(step) - 1e-6
    assert end(replace(step, graph=True)) <= end(step) + 1e-6, "a graph launches less"


# -- a data-parallel step ----------------------------------------------------------------------------------------------

EXCHANGES = st.builds(
    Exchange,
    gradients_mb=st.floats(0, 500),
    mb_per_s=st.floats(10, 10_000),
    latency_ms=st.floats(0, 20),
    buckets=st.integers(1, 64),
    backward_ms=st.floats(0, 300),
    forward_ms=st.floats(0, 300),
)


@given(EXCHANGES)
def test_one_bucket_at_a_time_and_none_before_its_gradients(exchange: Exchange) -> None:
    played = exchange.play()
    link = played.lanes["link"]
    assert len(link) == exchange.buckets
    for before, after in pairwise(link):
        assert after.start >= before.end - 1e-6
    for number, bucket in enumerate(link, start=1):
        assert bucket.start >= exchange.forward_ms + exchange.backward_ms * number / exchange.buckets - 1e-6
    assert played.step == pytest.approx(max(link[-1].end, exchange.computing_ms))


@given(EXCHANGES, st.floats(0, 50))
def test_a_worse_link_makes_no_step_shorter(exchange: Exchange, more: float) -> None:
    for worse in (
        replace(exchange, latency_ms=exchange.latency_ms + more),
        replace(exchange, mb_per_s=exchange.mb_per_s / (1 + more)),
        replace(exchange, gradients_mb=exchange.gradients_mb + more),
    ):
        assert worse.play().step >= exchange.play().step - 1e-6


def test_the_last_bucket_is_never_hidden() -> None:
    def exposed_ms(exchange: Exchange) -> float:
        return exchange.play().step - exchange.computing_ms

    one, some = Exchange(buckets=1), Exchange(buckets=4)
    assert exposed_ms(one) == pytest.approx(one.bucket_ms)
    assert some.bucket_ms <= exposed_ms(some) < exposed_ms(one)
    assert exposed_ms(Exchange(buckets=40)) > exposed_ms(some), "each has its latency"


def test_ring_tree_and_one_rank_cost_what_the_formulas_say() -> None:
    def ms(way: str, ranks: int, size_mb: float) -> float:
        return all_reduce_ms(way, ranks, size_mb, latency_ms=0.02, mb_per_s=10_000)

    assert ms("ring", 2, 100) == pytest.approx(2 * 0.02 + 10)
    assert ms("ring", 1024, 100) == pytest.approx(2 * 1023 * 0.02 + 2 * 1023 / 1024 * 10)
    assert ms("tree", 1024, 0.1) == pytest.approx(20 * 0.02 + 0.02) and ms("tree", 1024, 0.1) < ms("ring", 1024, 0.1)
    assert ms("ring", 8, 100) < ms("tree", 8, 100) < ms("one rank adds up", 8, 100)
    assert all(ms(way, 1, 100) == 0 for way in ("ring", "tree", "one rank adds up"))


# -- a pipeline --------------------------------------------------------------------------------------------------------

PIPELINES = st.builds(
    Pipeline,
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 20),
    schedule=st.sampled_from(list(SCHEDULES)),
    slowest=st.sampled_from([0.5, 1.0, 2.5]),
)


@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(list(SCHEDULES)))
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, micro_batches: int, schedule: Schedule) -> None:
    played = Pipeline(stages, micro_batches, schedule).play()
    assert played.share("wait") == pytest.approx(bubble(stages, micro_batches), abs=1e-9)
    turns = micro_batches + stages - 1
    assert played.step == pytest.approx((FORWARD_MS + BACKWARD_MS) / micro_batches * turns)


@given(st.integers(1, 8), st.integers(1, 20))
def test_what_a_stage_keeps_is_that_of_the_definition(stages: int, micro_batches: int) -> None:
    assert Pipeline(stages, micro_batches, "GPipe").play().each == (micro_batches,) * stages
    alternating = Pipeline(stages, micro_batches, "1F1B").play()
    assert alternating.each == tuple(min(stages - stage, micro_batches) for stage in range(stages))


@given(PIPELINES)
def test_no_pass_runs_before_what_it_needs(pipeline: Pipeline) -> None:
    """Each pass is looked up by its place in its stage's order."""
    times: dict[tuple[int, Operation], tuple[float, float]] = {}
    for stage, lane in enumerate(pipeline.play().lanes.values()):
        order = SCHEDULES[pipeline.schedule](stage, pipeline.stages, pipeline.micro_batches)
        passes = [block for block in lane if block.kind != "wait"]
        assert len(order) == len(passes) == 2 * pipeline.micro_batches
        for operation, block in zip(order, passes, strict=True):
            times[stage, operation] = block.start, block.end
        for before, after in pairwise(lane):
            assert after.start >= before.end - 1e-9
    for (stage, operation), (start, _) in times.items():
        if operation.way == "F":
            needs = (stage - 1, operation)
        else:
            needs = (stage + 1, operation)
            assert start >= times[stage, Operation("F", operation.micro_batch)][1] - 1e-9
        if needs in times:
            assert start >= times[needs][1] - 1e-9


@given(PIPELINES)
def test_a_slow_stage_keeps_all_others_waiting(pipeline: Pipeline) -> None:
    played = pipeline.play()
    others = 1.0 if pipeline.stages > 1 else 0.0
    slowest = max(others, pipeline.slowest) * (FORWARD_MS + BACKWARD_MS)
    assert played.step >= slowest - 1e-6, "no step is shorter than the work of its slowest stage"
    assert 0 <= played.share("wait") < 1


def test_stages_that_wait_for_each_other_are_named() -> None:
    def backwards(stage: int, stages: int, micro_batches: int) -> Order:
        return list(reversed(gpipe(stage, stages, micro_batches)))

    with pytest.raises(StagesWait, match="stage 0 waits at B1, stage 1 waits at B1") as stuck:
        play_orders(backwards, 2, 2)
    assert stuck.value.waiting[0] == ("B", 1)


def test_the_drawing_says_what_is_lost_and_kept() -> None:
    figure = draw(Pipeline(stages=4, micro_batches=4))
    assert {"0", "1", "2", "3"} <= {text.get_text() for text in figure.axes[0].texts}
    assert legend_of(figure) == ["forward", "nothing to do: the bubble", "backward"]
    many = draw(Pipeline(micro_batches=32))
    assert [text.get_text() for text in many.axes[0].texts] == ["a model, not a measurement"], "no numbers on top"
    own = draw_orders(one_forward_one_backward, 2, 1, "mine")
    assert own.axes[0].get_title(loc="left") == "mine: bubble 50 %; stage 1 keeps 1 micro-batch"


# -- jobs that share a device ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 7), st.integers(1, 20), st.integers(1, 10))
def test_the_model_is_the_rule_that_the_lesson_says(jobs: int, busy: int, fills: int) -> None:
    """Against closed forms: time slicing min(k, 1/u), MIG k / (1 - u + u max(1, k f)), MPS at most min(k, 1/(u f))."""
    u, f = busy / 20, fills / 10
    every = [Sharing(jobs, 5 * busy, 10 * fills, way).play() for way in WAYS]
    sliced, mps, mig = (sum(played.each) for played in every)
    assert sliced == pytest.approx(min(jobs, 1 / u), rel=0.06)
    assert mig == pytest.approx(jobs / (1 - u + u * max(1.0, jobs * f)), rel=0.06)
    assert 0.97 * sliced <= mps <= 1.06 * min(jobs, 1 / (u * f))
    if jobs * f <= 1 or u == 1:  # there is room for all at once, or never for fewer
        assert mps == pytest.approx(min(jobs, 1 / (u * f)), rel=0.06)
    for played in every:
        assert len(played.lanes) == jobs and max(played.each) <= 1.04


def test_one_job_computes_at_a_time_where_time_is_sliced() -> None:
    lanes = Sharing(3, 90).play().lanes.values()
    computing = sorted((b.start, b.end) for lane in lanes for b in lane if b.kind == "compute")
    assert all(end <= start for (_, end), (start, _) in pairwise(computing))
    assert not [b for lane in lanes for b in lane if b.kind == "communicate"]


@pytest.mark.parametrize("way", WAYS)
def test_title_and_label_of_the_model_do_not_meet(way: Any) -> None:
    figure = draw(Sharing(7, 100, 100, way))
    figure.draw_without_rendering()
    axes = figure.axes[0]
    [label] = [text for text in axes.texts if "a model" in text.get_text()]
    assert axes._left_title.get_window_extent().x1 < label.get_window_extent().x0  # type: ignore[attr-defined]
