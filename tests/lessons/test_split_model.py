"""Lesson 12: what its ranks measure, what it reads of their runs, and its three exercises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from gpulab.analysis.cores import CoreShare
from gpulab.lessons import split_model
from gpulab.lessons.check import NotMeasured
from gpulab.lessons.ranks import Stage, latest_note, local_bytes, note, saved_activations, training_tensors
from gpulab.lessons.split_model import (
    check_micro_batches,
    draw_bubbles,
)
from gpulab.run import Run
from tests.support import synthetic

# -- in the ranks ------------------------------------------------------------------------------------------------------


def test_the_stand_in_changes_no_value() -> None:
    torch.manual_seed(0)
    stage = Stage(width=4, sample_ms=0.01)
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(stage(x).square().sum(), x)
    (expected,) = torch.autograd.grad(stage.layers(x).square().sum(), x)
    assert torch.equal(stage(x), stage.layers(x)) and torch.equal(gradient, expected)


def test_kept_activations_are_those_of_the_layers() -> None:
    """A linear layer keeps its input, tanh its output: three tensors here, one of which two operators keep."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(16, 8)
    piece = x.numel() * x.element_size()
    with saved_activations(model) as count:
        first = model(x)
        assert count.now_bytes == 3 * piece
        first.sum().backward()
        assert count.now_bytes == 0
        both = model(x), model(torch.randn(16, 8))
        sum(one.sum() for one in both).backward()
    assert count.peak_bytes == 6 * piece


def test_what_a_training_keeps_is_counted() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    weights = (8 * 4 + 4) * 4
    assert local_bytes(training_tensors(model, optimizer)) == weights
    model(torch.randn(2, 8)).sum().backward()
    assert local_bytes(training_tensors(model, optimizer)) == 2 * weights
    optimizer.step()
    assert local_bytes(training_tensors(model, optimizer)) == 4 * weights, "and Adam's two, without its count of steps"


def test_a_note_is_read_from_the_trace() -> None:
    with torch.profiler.profile() as profiler:
        note("kept_bytes", 12)
        note("kept_bytes", 7)
    names = tuple(event.name for event in profiler.events())
    run = synthetic.cpu_case().run
    assert run.timeline is not None
    noting = replace(run, timeline=replace(run.timeline, names=(*run.timeline.names, *names)))
    assert (latest_note(noting, "kept_bytes"), latest_note(noting, "kept"), latest_note(run, "kept_bytes")) == (
        12,
        None,
        None,
    )


# -- exercise 1 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ran(micro_batches, bubble)`: so the exercise's pipeline ran in two ranks."""

    def was(micro_batches: int | None, measured: float | None, *, disturbed: bool = False) -> None:
        def latest(name: str) -> list[Run]:
            if micro_batches is None or name != split_model.MY_PIPELINE:
                raise NotMeasured(f"There is no run {name!r} yet")
            return [synthetic.cpu_case().run] * 2

        monkeypatch.setattr(split_model, "latest_ranks", latest)
        monkeypatch.setattr(split_model, "micro_batches_of", lambda run: micro_batches)
        monkeypatch.setattr(split_model, "measured_bubble", lambda name: measured)
        monkeypatch.setattr(split_model, "_is_disturbed", lambda ranks: disturbed)

    return was


def test_the_figure_has_a_point_for_each_run(ran: Any) -> None:
    ran(16, 0.08)
    labels = {line.get_label(): line for line in draw_bubbles(split_model.MY_PIPELINE, "another").axes[0].get_lines()}
    assert list(labels) == [*(f"formula, {stages} stages" for stages in (2, 4, 8)), "my-pipeline, measured"]
    assert np.array(labels["my-pipeline, measured"].get_xydata()).tolist() == [[16, 8]]
    assert np.array(labels["formula, 4 stages"].get_ydata())[7] == pytest.approx(100 * 3 / 11)


@pytest.mark.parametrize(
    ("answer", "ran_with", "measured", "state", "hint"),
    [
        (None, 2, 0.35, "unanswered", "Let the function return a number"),
        (16, 2, 0.35, "unanswered", "ran with 2 micro-batches, and the answer is 16"),
        (16, None, None, "unanswered", "There is no run"),
        (16, 16, 0.08, "right", "Measured: 8 %; the formula says 5.9 %. 16 micro-batches of 4 samples each."),
        (16, 16, None, "undecided", "not measurable"),
        (4, 4, 0.22, "wrong", "1 / (m + 1): which m"),
        (64, 64, 0.3, "wrong", "Try fewer"),
        (0, 2, 0.35, "wrong", "0 is no number of micro-batches"),
        ("16", 2, 0.35, "wrong", "'16' is no number of micro-batches"),
        (True, 2, 0.35, "wrong", "True is no number"),
    ],
)
def test_micro_batches_are_judged_by_their_run(
    ran: Any, answer: Any, ran_with: int | None, measured: float | None, state: str, hint: str
) -> None:
    ran(ran_with, measured)
    checked = check_micro_batches(lambda: answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_a_disturbed_run_is_not_held_against_the_answer(ran: Any) -> None:
    ran(16, 0.3, disturbed=True)
    assert check_micro_batches(lambda: 16).state == "undecided"
    ran(4, 0.3, disturbed=True)
    assert check_micro_batches(lambda: 4).state == "wrong", "by the formula alone"


@pytest.mark.parametrize(
    ("others", "own", "waits", "disturbed"),
    [(0.1, 0.05, 0.0, False), (1.0, 0.95, 0.0, False), (1.0, 0.05, 0.0, True), (0.1, 0.05, 0.3, True)],
)
def test_the_other_rank_is_no_other_program(
    monkeypatch: pytest.MonkeyPatch, others: float, own: float, waits: float, disturbed: bool
) -> None:
    empty: dict[str, Any] = dict.fromkeys(CoreShare.__struct_fields__)
    seen = CoreShare(**{**empty, "others_cores": others, "got_cores": own, "cores": 2})
    seen = replace(seen, thread_wait_fraction=waits)
    monkeypatch.setattr(split_model, "core_share", lambda run: seen)
    assert split_model._is_disturbed([synthetic.cpu_case().run] * 2) is disturbed
