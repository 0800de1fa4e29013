"""Which lines a backward pass belongs to: by the operators that looks met at these lines in the forward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.source_lines import backward_share
from gpulab.run import Category, Place, Run, StackSamples
from gpulab.timeline.labels import EVALUATING
from tests.support.rule_cases import run_of
from tests.support.timelines import MAIN, Span, timeline

CAT, MULTIPLY, BACKWARD = Place("cell", 1), Place("cell", 2), Place("cell", 3)
SPANS = (
    ("aten::cat", 0, 100),
    ("aten::mm", 100, 100),
    (f"{EVALUATING}CatBackward0", 200, 300),
    ("aten::mm", 300, 50),  # within the backward pass, where looks meet its line
    (f"{EVALUATING}MmBackward0", 500, 100),
    (f"{EVALUATING}OfTheUsersBackward", 600, 100),
)


def traced(of_multiply: list[int], **more: Any) -> Run:
    """Ten looks at each operator of the forward pass, of the second at these places in turn."""
    spans = [Span(name, Category.CPU_OP, MAIN, start, length) for name, start, length in SPANS]
    t_ns = np.concatenate((np.arange(10) * 10 + 1, np.arange(10) * 10 + 101, np.arange(50) * 10 + 201))
    place = np.concatenate((np.zeros(10), np.resize(of_multiply, 10), np.full(50, 2))).astype(np.int32)
    stack = StackSamples(t_ns, place, **{"exact": True, **more})
    return replace(
        run_of(),
        timeline=replace(timeline(spans), training_lane=MAIN),
        stack=stack,
        places=(CAT, MULTIPLY, BACKWARD),
    )


ACCOUNT = cast(Any, SimpleNamespace(step_host_windows=np.array([[0, 1000]])))


def test_a_node_is_the_line_whose_operator_it_is_of() -> None:
    run = traced([1])
    assert backward_share(run, ACCOUNT, {CAT}) == pytest.approx(0.3)
    assert backward_share(run, ACCOUNT, {MULTIPLY}) == pytest.approx(0.1)
    assert backward_share(run, ACCOUNT, {CAT, MULTIPLY}) == pytest.approx(0.4), (
        "whose the user's own node is, is unknown"
    )
    assert backward_share(run, ACCOUNT, {BACKWARD}) == 0


def test_what_two_lines_call_is_divided() -> None:
    assert backward_share(traced([0, 1]), ACCOUNT, {CAT}) == pytest.approx(0.35)


def test_without_looks_from_outside_nothing_is_known() -> None:
    assert backward_share(traced([1], exact=False), ACCOUNT, {CAT}) == 0
    assert backward_share(traced([1]), None, {CAT}) == 0
