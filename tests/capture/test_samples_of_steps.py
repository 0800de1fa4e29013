"""Batches that no DataLoader makes: how many samples a step has is seen at the model, or said not to be known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import gpulab
from gpulab.knobs.observation import StepInputs
from gpulab.knobs.observer import observe
from gpulab.run import Change, Run
from gpulab.tuning.compare.headline import comparison_headline, experiment_headline
from gpulab.tuning.record import Comparison, Experiment, Side
from gpulab.views.comparison import Compared
from tests.support import comparisons as made

SETUP = """
import torch
from torch import nn

x, y, bs = torch.randn(256, 16), torch.randint(0, 3, (256,)), 8
weight = torch.randn(16, 3, requires_grad=True)
model = nn.Linear(16, 3)
"""
CELL = """
optimizer = torch.optim.SGD([weight, *model.parameters()], lr=0.1)
for i in range(64):
    rows = slice(i * bs % 256, i * bs % 256 + bs)
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def _with_variable(side: Side, value: str, inputs: StepInputs | None) -> Side:
    """A side without a loader; `value` of the variable bs."""
    run: Run = made.run_of(side)
    steps = replace(run.steps, sample_count=run.steps.sample_count * 0 - 1)
    assert side.facts is not None
    known = replace(side.facts, run=replace(run, steps=steps, loader=None))
    blocks = tuple(replace(block, sample_count=None) for block in side.blocks)
    checks = (Change("bs", value, "16", "variable", "took effect", ""),) if value else ()
    return replace(side, facts=known, blocks=blocks, checks=checks, step_inputs=inputs)


def _compared(in_a: StepInputs | None, in_b: StepInputs | None, step_ms: float = 38.5) -> Comparison:
    b = Side("bs=64", {"bs": "64"}, made.facts_with(step_ms, made.PARTS_A, seed=4), made.blocks(1, step_ms))
    return made.a_comparison(_with_variable(b, "64", in_b), _with_variable(made.as_written(), "", in_a))


def test_another_number_of_rows_is_compared_per_sample() -> None:
    found = _compared((((16, 8),),), (((64, 8),),))
    assert (found.unit, found.verdict) == ("sample", "faster")
    assert found.ratio == pytest.approx(38.5 / 64 * 16 / 38, rel=0.02)
    assert found.parts[0].a_us_per_sample == pytest.approx(found.parts[0].a_us / 16)
    assert any("16 and 64" in note for note in found.notes)


def test_more_backward_passes_are_more_samples() -> None:
    more, same = (_compared((((16, 8),),), (((16, 8),),) * n, ms) for n, ms in ((4, 76.0), (1, 38.5)))
    assert (more.unit, more.verdict) == ("sample", "faster")
    assert (same.unit, same.verdict) == ("step", "no measurable difference")


@pytest.mark.parametrize(
    ("in_a", "in_b"),
    [
        (None, None),
        (None, (((64, 8),),)),
        ((((10, 16, 8),),), (((10, 64, 8),),)),  # the batch is the second dimension
        ((((16, 8),),), (((64, 9),),)),
        ((((16, 8), (4, 2)),), (((64, 8), (16, 2)),)),  # two inputs of one pass, of which one may be the batch
        ((((16,),),), (((64,),),)),  # one row, or one sample?
    ],
)
def test_where_the_samples_are_not_known_there_is_no_verdict(in_a: StepInputs | None, in_b: StepInputs | None) -> None:
    found = _compared(in_a, in_b)
    said = comparison_headline(found)
    assert (found.unit, found.verdict) == ("step", "not comparable")
    assert said.sentence == (
        "bs=64 cannot be compared with the baseline: changing `bs` may have changed how many samples a step "
        "has, and that is not known."
    )
    assert "By steps alone: 0.98" in said.evidence
    assert any("Not comparable: by steps alone" in line for s in Compared(found)._sections() for line in s.lines)


def test_a_sweep_of_such_a_variable_has_no_quickest() -> None:
    compared = tuple(_compared(None, None, ms) for ms in (38.5, 20.0))
    said = experiment_headline(Experiment((compared[0].a, *(c.b for c in compared)), compared, 1.0))
    assert said.key == "not_comparable" and "The quickest" not in said.evidence and "bs" in said.evidence


def _steps(model: Any, batches: list[Any], passes: int = 1) -> StepInputs | None:
    """What is seen of a training over these batches, with so many of them in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observe() as seen:
        for i, batch in enumerate(batches):
            model(batch).sum().backward()
            if i % passes == passes - 1:
                optimizer.step()
    return seen.inputs.of_a_step


def test_what_a_model_is_given_in_a_step_is_seen() -> None:
    assert _steps(nn.Linear(3, 2), [torch.randn(4, 3)] * 40) == (((4, 3),),)
    assert _steps(nn.Linear(3, 2), [torch.randn(4, 3)] * 40, passes=3) == (((4, 3),),) * 3
    assert _steps(nn.Linear(3, 2), [torch.randn(i, 3) for i in range(1, 9)]) is None  # never the same
    assert _steps(nn.Linear(3, 2), [torch.randn(4, 3)] * 50, passes=40) is None  # none was watched to its end

    class Detector(nn.Linear):
        def forward(self, images: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            return super().forward(images[0])

    assert _steps(Detector(3, 2), [[torch.randn(4, 3)] * 5] * 20) is None, "a list of inputs tells no batch"


def test_a_pass_that_was_watched_in_part_does_not_count() -> None:
    first, second, third = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *third.parameters()], lr=0.1)
    with observe() as seen:
        for _ in range(20):  # no number of watched calls is a multiple of three
            third(second(first(torch.randn(4, 3)))).sum().backward()
            optimizer.step()
    assert seen.inputs.of_a_step == (((4, 3), (4, 4), (4, 5)),)


def _experiment(cell: str) -> Any:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    return gpulab.experiment(cell, {"bs": 32}, namespace=names, pairs=3, steps=4, save=False, show=False)


def test_batches_cut_by_slicing() -> None:
    assert _experiment(CELL).only.unit == "sample"
    assert _experiment(CELL.replace("model(x[rows])", "x[rows] @ weight")).verdict == "not comparable"
