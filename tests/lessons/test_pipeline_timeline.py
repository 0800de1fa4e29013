"""The model of a pipeline that is turned by hand, against the formula of its bubble."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulab.lessons.pipeline_timeline import (
    BACKWARD_MS,
    FORWARD_MS,
    SCHEDULES,
    Deadlock,
    Operation,
    Order,
    Pipeline,
    Schedule,
    bubble,
    draw_orders,
    draw_pipeline,
    gpipe,
    one_forward_one_backward,
    play_pipeline,
)

PIPELINES = st.builds(
    Pipeline,
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 20),
    schedule=st.sampled_from(list(SCHEDULES)),
    slowest=st.sampled_from([0.5, 1.0, 2.5]),
)


@given(st.integers(1, 8), st.integers(1, 20), st.sampled_from(list(SCHEDULES)))
def test_equal_stages_have_the_bubble_of_the_formula(stages: int, micro_batches: int, schedule: Schedule) -> None:
    played = Pipeline(stages, micro_batches, schedule).played
    assert played.bubble_fraction == pytest.approx(bubble(stages, micro_batches), abs=1e-9)
    turns = micro_batches + stages - 1
    assert played.step_ms == pytest.approx((FORWARD_MS + BACKWARD_MS) / micro_batches * turns)


@given(st.integers(1, 8), st.integers(1, 20))
def test_what_a_stage_keeps_is_that_of_the_definition(stages: int, micro_batches: int) -> None:
    assert Pipeline(stages, micro_batches, "GPipe").played.kept == (micro_batches,) * stages
    alternating = Pipeline(stages, micro_batches, "1F1B").played
    assert alternating.kept == tuple(min(stages - stage, micro_batches) for stage in range(stages))


@given(PIPELINES)
def test_no_pass_runs_before_what_it_needs(pipeline: Pipeline) -> None:
    """Each pass is looked up by its place in its stage's order."""
    played = pipeline.played
    times: dict[tuple[int, Operation], tuple[float, float]] = {}
    for stage, lane in enumerate(played.lanes):
        order = SCHEDULES[pipeline.schedule](stage, pipeline.stages, pipeline.micro_batches)
        passes = [block for block in lane if block.kind != "wait"]
        assert len(order) == len(passes) == 2 * pipeline.micro_batches
        for operation, block in zip(order, passes, strict=True):
            times[stage, operation] = block.start, block.start + block.length
        for before, after in pairwise(lane):
            assert after.start >= before.start + before.length - 1e-9
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
    played = pipeline.played
    others = 1.0 if pipeline.stages > 1 else 0.0
    slowest = max(others, pipeline.slowest) * (FORWARD_MS + BACKWARD_MS)
    assert played.step_ms >= slowest - 1e-6, "no step is shorter than the work of its slowest stage"
    assert 0 <= played.bubble_fraction < 1


def test_stages_that_wait_for_each_other_are_named() -> None:
    def backwards(stage: int, stages: int, micro_batches: int) -> Order:
        return list(reversed(gpipe(stage, stages, micro_batches)))

    with pytest.raises(Deadlock, match="stage 0 waits at B1, stage 1 waits at B1") as stuck:
        play_pipeline(backwards, 2, 2)
    assert stuck.value.waiting[0] == ("B", 1)


def test_the_drawing_says_what_is_lost_and_kept() -> None:
    figure = draw_pipeline(Pipeline(stages=4, micro_batches=4))
    assert {"0", "1", "2", "3"} <= {text.get_text() for text in figure.axes[0].texts}
    assert figure.axes[0].get_title(loc="left") == "GPipe: bubble 43 %; stage 1 keeps 4 micro-batches"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["forward", "nothing to do: the bubble", "backward"]
    many = draw_pipeline(Pipeline(micro_batches=32))
    assert [text.get_text() for text in many.axes[0].texts] == ["a model, not a measurement"], "no numbers on top"
    own = draw_orders(one_forward_one_backward, 2, 1, "mine")
    assert own.axes[0].get_title(loc="left") == "mine: bubble 50 %; stage 1 keeps 1 micro-batch"
