"""Lesson 12: what its ranks measure, what it reads of their runs, and its three exercises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

from gpulab.analysis.host.core_time import CoreShare
from gpulab.lessons import split_model
from gpulab.lessons.pipeline_timeline import gpipe, one_forward_one_backward
from gpulab.lessons.split_model import (
    check_micro_batches,
    check_schedule,
    check_tensor_parallel,
    draw_bubbles,
    whole_block,
)
from gpulab.lessons.stages import Stage, kept_activations, local_bytes, note, noted, training_tensors
from gpulab.run import Run
from tests.lessons.notebook_kernel import shipped
from tests.support import synthetic
from tests.support.kernel_session import KernelSession, kernel

# -- in the ranks ------------------------------------------------------------------------------------------------------


def test_the_stand_in_changes_no_value() -> None:
    torch.manual_seed(0)
    stage = Stage(width=4, sample_ms=0.01)
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(stage(x).square().sum(), x)
    (wanted,) = torch.autograd.grad(stage.layers(x).square().sum(), x)
    assert torch.equal(stage(x), stage.layers(x)) and torch.equal(gradient, wanted)


def test_kept_activations_are_those_of_the_layers() -> None:
    """A linear layer keeps its input, tanh its output: three tensors here, one of which two operators keep."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(16, 8)
    piece = x.numel() * x.element_size()
    with kept_activations(model) as kept:
        first = model(x)
        assert kept.now_bytes == 3 * piece
        first.sum().backward()
        assert kept.now_bytes == 0
        both = model(x), model(torch.randn(16, 8))
        sum(one.sum() for one in both).backward()
    assert kept.peak_bytes == 6 * piece


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
    assert (noted(noting, "kept_bytes"), noted(noting, "kept"), noted(run, "kept_bytes")) == (12, None, None)


# -- in two ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    """The lesson's notebook as far as 1F1B."""
    with kernel(tmp_path_factory.mktemp("split")) as started:
        for cell in shipped("12_split_model").cells:
            if cell.cell_type == "code" and cell.id in (*RUNS, "open-lesson", "setup"):
                answer = started.run(cell.source)
                assert answer.status == "ok", answer.error
        yield started


RUNS = ("one-micro-batch", "eight-micro-batches", "one-forward-one-backward")


def test_1f1b_keeps_a_quarter_of_eight_micro_batches(session: KernelSession) -> None:
    assert session.value("lesson.reveal('kept').measured") == 25
    counts = "[split_model.micro_batches_of(run) for name in RUNS for run in split_model.ranks_named(name)]"
    session.run(f"from gpulab.lessons import split_model\nRUNS = {RUNS}")
    assert session.value(counts) == [1, 1, 8, 8, 8, 8]
    lines = session.value("[line.split() for line in bubbles(*RUNS, 'another').lines]")
    assert [line[:3] for line in lines[1:4]] == [[RUNS[0], "2", "1"], [RUNS[1], "2", "8"], [RUNS[2], "2", "8"]]
    assert [line[3:5] for line in lines[1:4]] == [["50", "%"], ["11", "%"], ["11", "%"]]
    assert lines[4] == ["another", "has", "not", "run", "yet"]


def test_one_micro_batch_lets_one_rank_work_at_a_time(session: KernelSession) -> None:
    session.run("from gpulab.lessons import split_model")
    assert session.value("split_model.measured_bubble('one-micro-batch')") > 0.4, "by the order of work, not by speed"
    assert session.value("lesson.reveal('idle').closeness") == "no guess"
    assert session.value("lesson.reveal('micro-batches').closeness") in ("no guess", "undecided")
    assert session.value("lesson.reveal('exchanging').closeness") == "not measured"


def test_a_report_of_a_pipeline_names_no_straggler(session: KernelSession) -> None:
    session.run("import gpulab\nreport = gpulab.report(gpulab.api.reading.open_run('eight-micro-batches'))")
    assert session.value("report.json()['straggler']") is None
    assert "messages" in session.value("report.json()['mismatch']")


# -- exercise 1 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ran(micro_batches, bubble)`: so the exercise's pipeline ran in two ranks."""

    def was(micro_batches: int | None, measured: float | None, *, disturbed: bool = False) -> None:
        runs: list[Run] = [] if micro_batches is None else [synthetic.cpu_case().run] * 2
        monkeypatch.setattr(split_model, "ranks_named", lambda name: runs if name == split_model.CHOSEN else [])
        monkeypatch.setattr(split_model, "micro_batches_of", lambda run: micro_batches)
        monkeypatch.setattr(split_model, "measured_bubble", lambda name: measured)
        monkeypatch.setattr(split_model, "_is_disturbed", lambda ranks: disturbed)

    return was


def test_the_figure_has_a_point_for_each_run(ran: Any) -> None:
    ran(16, 0.08)
    labels = {line.get_label(): line for line in draw_bubbles(split_model.CHOSEN, "another").axes[0].get_lines()}
    assert list(labels) == [*(f"formula, {stages} stages" for stages in (2, 4, 8)), "my-pipeline, measured"]
    assert np.array(labels["my-pipeline, measured"].get_xydata()).tolist() == [[16, 8]]
    assert np.array(labels["formula, 4 stages"].get_ydata())[7] == pytest.approx(100 * 3 / 11)


@pytest.mark.parametrize(
    ("answer", "ran_with", "measured", "state", "hint"),
    [
        (None, 2, 0.35, "unanswered", "Let the function return a number"),
        (16, 2, 0.35, "unanswered", "ran with 2 micro-batches, and the answer is 16"),
        (16, None, None, "unanswered", "has no run yet"),
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


def test_no_answer_at_all_is_none() -> None:
    assert check_micro_batches(...).state == "unanswered"


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


# -- exercise 2 --------------------------------------------------------------------------------------------------------


def plain(order: Any) -> Any:
    return lambda *which: [tuple(operation) for operation in order(*which)]


def eager(stage: int, stages: int, micro_batches: int) -> Any:
    """One more forward pass ahead than is needed."""
    return one_forward_one_backward(stage, stages + 1, micro_batches)


def one_at_a_time(stage: int, stages: int, micro_batches: int) -> Any:
    return [(way, i) for i in range(micro_batches) for way in ("F", "B")]


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (lambda *_: None, "unanswered", "in place of the dots"),
        (plain(one_forward_one_backward), "right", "whatever m is"),
        (one_forward_one_backward, "right", "whatever m is"),
        (plain(gpipe), "wrong", "and 1 are enough"),
        (eager, "wrong", "keeps the activations of 2 micro-batches at once, and 1 are enough"),
        (one_at_a_time, "wrong", "its bubble is"),
        (lambda s, p, m: list(reversed(gpipe(s, p, m))), "wrong", "wait for each other"),
        (lambda s, p, m: "F0", "wrong", "gives a str"),
        (lambda s, p, m: ["F0"], "wrong", "'F0' is no pass"),
        (lambda s, p, m: gpipe(s, p, m)[:-1], "wrong", "never runs ('B', 2)"),
        (lambda s, p, m: [*gpipe(s, p, m), ("B", 0)], "wrong", "runs ('B', 0), which is there already"),
    ],
)
def test_a_schedule_gets_a_hint(answer: Any, state: str, hint: str) -> None:
    checked = check_schedule(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


# -- exercise 3 --------------------------------------------------------------------------------------------------------


def part(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, last: Tensor, rank: int, ranks: int) -> Tensor:
    mine = slice(rank * len(first) // ranks, (rank + 1) * len(first) // ranks)
    return functional.gelu(x @ first[mine].T + bias[mine]) @ second[:, mine].T + last / ranks


def by_first_rank(*given: Any) -> Tensor:
    *tensors, rank, _ = given
    whole = whole_block(*tensors)
    return whole if rank == 0 else 0 * whole


def shared_result(*given: Any) -> Tensor:
    *tensors, _, ranks = given
    return whole_block(*tensors).div(ranks)


def without_rows(x: Tensor, first: Tensor, bias: Tensor, second: Tensor, last: Tensor, rank: int, ranks: int) -> Tensor:
    """The features are cut instead of the hidden ones: GELU of a part of the sum."""
    mine = slice(rank * x.shape[1] // ranks, (rank + 1) * x.shape[1] // ranks)
    return functional.gelu(x[:, mine] @ first[:, mine].T + bias / ranks) @ second.T + last / ranks


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (lambda *_: None, "unanswered", "in place of the dots"),
        (part, "right", "one all-reduce"),
        (by_first_rank, "wrong", "100 % of the arithmetic"),
        (shared_result, "wrong", "Take a part of the weights"),
        (without_rows, "wrong", "differs from the whole block"),
        (lambda *g: part(*g) + g[4] * (1 - 1 / g[6]), "wrong", "once for each rank"),
        (lambda *g: part(*g) - g[4] / g[6], "wrong", "the last bias is missing"),
        (lambda *g: part(*g)[:2], "wrong", "a tensor of the shape [5, 8] is wanted"),
        (lambda *g: [0.0], "wrong", "gives list"),
        (lambda *g: part(g[0].detach(), *g[1:]) + 0 * g[0], "wrong", "their gradients are not"),
    ],
)
def test_a_part_gets_a_hint(answer: Any, state: str, hint: str) -> None:
    checked = check_tensor_parallel(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_the_parts_of_all_questions_have_words() -> None:
    assert all(question.text.endswith("?") and question.what for question in split_model.QUESTIONS.values())
    assert np.all([question.unit in ("%", "times") for question in split_model.QUESTIONS.values()])
