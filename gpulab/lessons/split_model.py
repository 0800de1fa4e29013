"""Lesson 12, splitting a model: the bubble of a pipeline, its order of work, one layer on several ranks, and FSDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from gpulab.analysis.cores import LEAST_OTHERS, CoreShare, core_share
from gpulab.analysis.facts import facts
from gpulab.formatting import percent, plural
from gpulab.lessons.check import (
    QUIETER,
    Checked,
    NoAnswer,
    NotMeasured,
    Table,
    exercise,
    right,
    unanswered,
    undecided,
    wrong,
)
from gpulab.lessons.figures import GREY, plot
from gpulab.lessons.guesses import Question, share, times_between
from gpulab.lessons.lanes import Played
from gpulab.lessons.measured import communicating_share, latest_ranks, working_share
from gpulab.lessons.pipeline import StagesWait, batches, bubble, play_orders
from gpulab.lessons.ranks import FORWARD, latest_note
from gpulab.lessons.training import gradients_of
from gpulab.run import Run
from gpulab.timeline.labels import OPERATORS, labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_BUBBLE = 0.1  # in exercise 1
ACTIVATIONS, WHOLE, SHARDED = "kept_bytes", "whole_bytes", "sharded_bytes"  # names of the ranks' notes
ONE, EIGHT, ALTERNATING, MY_PIPELINE = (
    "one-micro-batch",
    "eight-micro-batches",
    "one-forward-one-backward",
    "my-pipeline",
)


# -- what the ranks measured -------------------------------------------------------------------------------------------


def measured_bubble(name: str) -> float | None:
    """The share of the profiled steps of that name in which a rank's device idles, mean over the ranks."""
    shares = [working_share(facts(run)) for run in latest_ranks(name)]
    measured_shares = [share for share in shares if share is not None]
    return 1 - float(np.mean(measured_shares)) if len(measured_shares) == len(shares) else None


def micro_batches_of(run: Run) -> int | None:
    """The number of forward passes of the stand-in in a profiled step; None without such a step."""
    timeline = run.timeline
    if timeline is None or not len(run.traced_rows):
        return None
    spans = labels(timeline)
    passes = spans.training(*OPERATORS) & spans.named(FORWARD.__eq__)
    starts = timeline.start_ns[passes]
    row = int(run.traced_rows[-1])
    count = int(((starts >= run.steps.start_ns[row]) & (starts < run.steps.end_ns[row])).sum())
    return count or None


def _measured(names: Sequence[str]) -> dict[str, tuple[int, int, float]]:
    """Ranks, micro-batches and bubble of the run of each name, without runs for which one of these is unknown."""
    measured = {}
    for name in names:
        with suppress(NotMeasured):
            ranks, share = latest_ranks(name), measured_bubble(name)
            count = micro_batches_of(ranks[0])
            if count is not None and share is not None:
                measured[name] = len(ranks), count, share
    return measured


def bubbles(*names: str) -> Table:
    """The measured bubble of each run, next to the formula's bubble."""
    measured = _measured(names)
    rows = [(name, r, m, percent(bubble(r, m)), percent(share)) for name, (r, m, share) in measured.items()]
    below = [f"{name} has not run yet" for name in names if name not in measured]
    return Table.of(("run", "ranks", "micro-batches", "formula", "measured"), rows, *below)


def draw_bubbles(*names: str) -> Figure:
    """The formula's bubble over the number of micro-batches, with each measured run as a point."""
    counts = np.arange(1, 65)
    ticks, labels = [2**n for n in range(7)], ("", "micro-batches", "bubble, % of a step")
    with plot(8, 3.2, *labels, log={"x": 2}, ticks=ticks, legend={"loc": "upper right"}) as (figure, axes):
        for stages, style in ((2, "-"), (4, "--"), (8, ":")):
            formula = [100 * bubble(stages, int(m)) for m in counts]
            axes.plot(counts, formula, style, color=GREY, label=f"formula, {stages} stages")
        for (name, (_, count, share)), marker in zip(_measured(names).items(), "osD^v", strict=False):
            axes.plot([count], [100 * share], marker, label=f"{name}, measured", markersize=8)
        axes.set_ylim(0, 100)
    return figure


def _bytes(name: str, word: str) -> int:
    """The figure that rank 0 of the run `name` noted under `word`. Raises NotMeasured."""
    size_bytes = latest_note(latest_ranks(name)[0], word)
    if not size_bytes:
        raise NotMeasured(f"The run {name!r} noted no {word}: run its cell again.")
    return size_bytes


def _exchanging_share() -> float | None:
    shares = [communicating_share(facts(run)) for run in latest_ranks("tensor-parallel")]
    measured_shares = [share for share in shares if share is not None]
    return float(np.mean(measured_shares)) if measured_shares else None


# -- exercise 1: enough micro-batches ----------------------------------------------------------------------------------


@exercise("Let the function return a number, run that cell and the one below it, then this one again.")
def check_micro_batches(my_micro_batches: Any) -> Checked:
    """Whether the run with `my_micro_batches` has a bubble below a tenth."""
    answer = my_micro_batches() if callable(my_micro_batches) else my_micro_batches
    if answer in (None, ...):
        raise NoAnswer
    if isinstance(answer, bool) or not isinstance(answer, int) or answer < 1:
        return wrong(f"{answer!r} is no number of micro-batches: expected an integer from 1 to 64.")
    ranks = latest_ranks(MY_PIPELINE)
    ran_with = micro_batches_of(ranks[0])
    if ran_with != answer:
        ran = f"ran with {batches(ran_with or 0)}, and the answer is {answer}"
        return unanswered(f"The pipeline {ran}: run the cell below the function again.")
    measured, formula = measured_bubble(MY_PIPELINE), bubble(len(ranks), answer)
    if measured is None:
        return undecided(f"Where the time of the run's steps went is not measurable. {QUIETER}")
    figures = f"Measured: {percent(measured)}; the formula says {percent(formula)}."
    if measured < LARGEST_BUBBLE:
        return right(f"{figures} {batches(answer)} of {plural(max(1, 64 // answer), 'sample')} each.")
    if formula >= LARGEST_BUBBLE:
        return wrong(f"{figures} With p = {len(ranks)} the bubble is 1 / (m + 1): which m makes it less than a tenth?")
    if _is_disturbed(ranks):
        return undecided(f"{figures} Other programs held the ranks up. {QUIETER}")
    return wrong(
        f"{figures} What the formula leaves out is what each micro-batch costs by itself: its messages and its "
        "operators. Try fewer that still are enough by the formula."
    )


def _is_disturbed(ranks: list[Run]) -> bool:
    """Whether programs other than these ranks took enough of the cores to delay the ranks."""
    shares: list[CoreShare] = [one for run in ranks if (one := core_share(run)) is not None]
    every = sum(one.got_cores or 0.0 for one in shares)
    for own in shares:
        used = every - (own.got_cores or 0.0)  # by the other ranks, which count as other programs
        others = 0.0 if own.others_cores is None else (own.others_cores - used) / (own.cores or 1)
        if max(others, own.thread_wait_fraction or 0.0) >= LEAST_OTHERS:
            return True
    return False


# -- exercise 2: one forward, one backward -----------------------------------------------------------------------------


@exercise()
def check_schedule(my_schedule: Any) -> Checked:
    """Whether `my_schedule(stage, stages, micro_batches)` is an order with GPipe's bubble that keeps as few as 1F1B."""
    for stages, micro_batches in ((1, 3), (2, 4), (4, 8), (3, 2), (4, 3)):
        orders = [my_schedule(stage, stages, micro_batches) for stage in range(stages)]
        where = f"With {plural(stages, 'stage')} and {batches(micro_batches)}"
        for stage, order in enumerate(orders):
            if hint := _incomplete(order, micro_batches, stage):
                return wrong(f"{where}: {hint}")
        try:
            played = play_orders(lambda stage, *_: orders[stage], stages, micro_batches)  # noqa: B023
        except StagesWait as deadlock:
            return wrong(f"{where} the stages wait for each other, and for ever: {deadlock}. Stages count from 0.")
        if hint := _wasteful(played, stages, micro_batches):
            return wrong(f"{where} {hint}")
    return right(
        "It has the bubble of GPipe, and stage s of p never keeps more than p - s micro-batches, whatever m is."
    )


def _incomplete(order: Any, micro_batches: int, stage: int) -> str:
    """Why the order is not a complete order of a stage's passes; empty if it is."""
    if not isinstance(order, list | tuple):
        return f"for stage {stage} it gives a {type(order).__name__}; expected a list."
    strange = next((one for one in order if not _is_operation(one)), None)
    if strange is not None:
        return (
            f'{strange!r} is no pass: ("F", 0) is the forward pass of the first micro-batch, ("B", 0) the backward one.'
        )
    expected = {(way, i) for way in ("F", "B") for i in range(micro_batches)}
    passes = [tuple(one) for one in order]
    missing = sorted(expected - set(passes))
    if missing:
        return f"stage {stage} never runs {missing[0]!r}."
    twice = next((one for one in passes if passes.count(one) > 1 or one not in expected), None)
    return f"stage {stage} runs {twice!r}, which is there already or does not exist." if twice is not None else ""


def _is_operation(one: object) -> bool:
    return isinstance(one, list | tuple) and len(one) == 2 and one[0] in ("F", "B") and isinstance(one[1], int)


def _wasteful(played: Played, stages: int, micro_batches: int) -> str:
    formula = bubble(stages, micro_batches)
    if played.share("wait") > formula + 1e-9:
        return (
            f"its bubble is {percent(played.share('wait'))}, and {percent(formula)} is possible. Does a stage wait "
            "for a backward pass when it could run another forward pass?"
        )
    for stage, saved_count in enumerate(map(int, played.each)):
        most = min(stages - stage, micro_batches)
        if saved_count > most:
            return (
                f"stage {stage} keeps the activations of {batches(saved_count)} at once, and {most} are enough. First "
                "as many forward passes as there are stages after it, then one forward and one backward in turn."
            )
    return ""


# -- exercise 3: one layer on several ranks ----------------------------------------------------------------------------


def whole_block(x: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, second_bias: Tensor) -> Tensor:
    """[samples, features] → the same shape: two linear layers, as on one device. `first` is [hidden, features]."""
    return functional.gelu(x @ first.T + first_bias) @ second.T + second_bias


@exercise()
def check_tensor_parallel(my_part: Any) -> Checked:
    """Whether the parts of all ranks add up to the whole block, with its gradient, and each does its share of work."""
    for ranks in (1, 2, 4):
        if hint := _part_hint(my_part, ranks):
            return wrong(f"With {plural(ranks, 'rank')}: {hint}")
    return right(
        "The parts add up to the whole, gradients too, and each rank does its share of the arithmetic. Between the two "
        "layers nothing is exchanged: one all-reduce at the end is enough."
    )


def _part_hint(my_part: Any, ranks: int) -> str:
    random = torch.Generator().manual_seed(0)
    shapes = ((5, 8), (16, 8), (16,), (8, 16), (8,))
    tensors = [torch.randn(s, generator=random, dtype=torch.float64).requires_grad_() for s in shapes]
    expected, all_flops = _with_flops(lambda: whole_block(*tensors))
    parts, most_flops = [], 0
    for rank in range(ranks):
        part, flops = _with_flops(lambda: my_part(*tensors, rank, ranks))  # noqa: B023
        if not isinstance(part, Tensor) or part.shape != expected.shape:
            shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            return f"rank {rank} gives {shape}; expected a tensor of the shape {list(expected.shape)}."
        parts.append(part)
        most_flops = max(most_flops, flops)
    total, bias = torch.stack(parts).sum(dim=0), tensors[-1].expand_as(expected)
    difference = total - expected
    same = all(
        a is not None and b is not None and torch.allclose(a, b)
        for a, b in zip(gradients_of(total, tensors), gradients_of(expected, tensors), strict=True)
    )
    if ranks > 1 and torch.allclose(difference, (ranks - 1) * bias):
        return "the last bias is in the sum once for each rank. Let one rank add it, or each a part of it."
    if torch.allclose(difference, -bias):
        return "the last bias is missing."
    if not torch.allclose(total, expected):
        return (
            f"the sum of all parts differs from the whole block by up to {difference.abs().max().item():.3g}. Which "
            "rows of `first` and which columns of `second` belong together? And has each part its piece of the first "
            "bias?"
        )
    if most_flops > all_flops / ranks * 1.01:
        return (
            f"the sum is right, but one rank does {percent(most_flops / all_flops)} of the arithmetic, and "
            f"{percent(1 / ranks)} is its share. Take a part of the weights, not of the result."
        )
    if not same:
        return "the values are right, their gradients are not."
    return ""


def _with_flops(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result of `work`, and its FLOP."""
    with FlopCounterMode(display=False) as counter:
        result = work()
    return result, int(counter.get_total_flops())


QUESTIONS: Mapping[str, Question] = {
    "idle": share(
        "For what share of each step has a rank nothing to compute?",
        lambda: measured_bubble(ONE),
        "of each step a rank has nothing to compute, with one micro-batch",
    ),
    "micro-batches": times_between("What speedup do eight micro-batches give?", ONE, EIGHT, "with eight micro-batches"),
    "kept": share(
        "How much of GPipe's activations does rank 0 keep with 1F1B?",
        lambda: _bytes(ALTERNATING, ACTIVATIONS) / _bytes(EIGHT, ACTIVATIONS),
        "of GPipe's activations are kept by rank 0 with 1F1B",
    ),
    "exchanging": share(
        "What share of each step is exchange with the other rank, or waiting for it?",
        _exchanging_share,
        "of each step is exchange between two tensor-parallel ranks, or waiting",
    ),
    "sharded": share(
        "What share of weights, gradients and Adam's state does each of two ranks keep?",
        lambda: _bytes("sharded", SHARDED) / _bytes("sharded", WHOLE),
        "of weights, gradients and optimizer state are kept by each rank with FSDP",
    ),
}
