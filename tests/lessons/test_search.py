"""Lesson 10: the trials of a search, its front, and the exercises on choosing and on stopping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import islice

import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import DataLoader

from gpulab.api.profile import profile
from gpulab.errors import GpulabError
from gpulab.lessons import search
from gpulab.lessons.digits import SearchDigits, split_digits
from gpulab.lessons.search import (
    Kind,
    Pace,
    Pair,
    Trial,
    compare_searches,
    draw_curves,
    draw_front,
    endless,
    first_pace,
    front_of,
    network,
    search_lanes,
    table_of,
    validation_loss,
)

Pairs = Sequence[Pair]


def trial(us: float, loss: float | None, *, kind: str = "conv", stopped: str = "", seconds: float = 1.0) -> Trial:
    choice = {"kind": kind, "width": 16, "depth": 2, "batch_size": 32, "rate": 0.01, "decay": 0.0, "augment": "none"}
    return Trial(choice, seconds, us, loss, Pace(us, 0.5), stopped)


# -- the parts of a search ---------------------------------------------------------------------------------------------


def test_no_digit_is_trained_on_and_validated() -> None:
    trained, validated = split_digits(training=True)[0], split_digits(training=False)[0]
    assert (len(trained), len(validated)) == (1440, 357)
    assert trained.shape[1:] == (1, 8, 8) and 0 <= float(trained.min()) <= float(trained.max()) <= 1
    assert set(split_digits(training=False)[1].tolist()) == set(range(10))


def test_augmented_digits_are_the_seeds_and_no_others() -> None:
    plain, shifted, turned = (SearchDigits(augment) for augment in ("none", "shift", "turn"))
    assert torch.equal(plain[5][0], plain[5][0])
    for digits in (shifted, turned):
        torch.manual_seed(1)
        first = [digits[index][0] for index in range(8)]
        torch.manual_seed(1)
        again = [digits[index][0] for index in range(8)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert any(not torch.equal(image, plain[index][0]) for index, image in enumerate(first))
        assert all(digits[index][1] == plain[index][1] for index in range(8))


@pytest.mark.parametrize("kind", ["dense", "conv", "depthwise"])
@pytest.mark.parametrize("depth", [1, 3])
def test_every_architecture_classifies_and_is_validated(kind: Kind, depth: int) -> None:
    model = network(kind, 16, depth)
    assert model(torch.zeros(4, 1, 8, 8)).shape == (4, 10)
    assert model.training and validation_loss(model) > 0 and model.training


def test_the_first_steps_have_a_pace_and_a_share() -> None:
    model = network("conv", 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(show=False, live=False, save=False) as first:
        for images, labels in islice(endless(DataLoader(SearchDigits(), batch_size=720)), 3):  # more than an epoch
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    pace = first_pace(first.run, 720)
    assert pace.us_per_sample > 0 and (math.isnan(pace.share) or 0 < pace.share < 1)
    with profile(show=False, live=False, save=False, trace=False) as nothing:
        pass
    with pytest.raises(GpulabError, match="too few steps"):
        first_pace(nothing.run, 32)


def test_the_front_leaves_out_what_is_beaten_stopped_or_diverged() -> None:
    trials = [
        trial(30, 1),
        trial(10, 3),
        trial(20, 3),
        trial(5, math.nan),
        trial(1, None, stopped="slow"),
        trial(30, 1),
    ]
    assert [(t.us_per_sample, t.loss) for t in front_of(trials)] == [(10, 3), (30, 1), (30, 1)]
    lines = table_of(trials).lines
    assert [line[0] for line in lines[1:]].count("*") == 3
    chosen = ["conv", "16", "2", "32", "0.01", "0", "none"]
    assert lines[-1].split() == ["1", "us", "-", "1.00", "50.0", "%", *chosen, "slow"]
    unseen = replace(trials[0], pace=None)
    assert "works" not in repr(table_of([unseen])) and " - conv" in table_of([unseen, trials[1]]).lines[1]


def test_a_row_says_all_that_was_chosen() -> None:
    """Two trials that differ in the learning rate alone are two rows."""
    slow, fast = (replace(trial(1, 1.0), choice={**trial(1, 1.0).choice, "rate": rate}) for rate in (0.01, 0.0003))
    assert slow.words == "conv, width 16, depth 2, batch 32, rate 0.01, decay 0, none"
    head, one, other = table_of([slow, fast]).lines
    assert head.split()[-7:] == ["kind", "width", "depth", "batch", "rate", "decay", "augment"]
    assert one != other and "0.0003" in other
    longest = {"kind": "depthwise", "width": 128, "depth": 3, "batch_size": 128, "rate": 0.0003, "decay": 0.01}
    row = replace(trial(9999, None, seconds=99, stopped="starves"), choice={**longest, "augment": "shift"})
    assert max(map(len, table_of([row, trial(1, 10.0)]).lines)) <= 96, "as wide as a cell of the notebook"


def test_a_share_below_the_limit_is_never_shown_as_it() -> None:
    shares = [search._share_words(Pace(1.0, share)) for share in (0.19999, 0.2, 0.196, math.nan)]
    assert shares == ["19.9 %", "20.0 %", "19.6 %", "-"]


def test_what_stopping_saved_and_lost_is_added_up() -> None:
    full = [trial(10, 2.0, seconds=1), trial(90, 0.5, seconds=9), trial(80, 3.0, seconds=8)]
    pruned = [
        trial(10, 2.0, seconds=2),
        trial(90, None, stopped="slow", seconds=1),
        trial(80, None, stopped="slow", seconds=1),
    ]
    text = repr(compare_searches(full, pruned))
    assert "18.0 s" in text and "4.0 s   2 of 3 trials stopped" in text
    assert "2.0 s   they took 17.0 s to their end" in text and "they took 1.0 s without a look" in text
    assert "speedup 4.5×" in text
    assert "2 trials, of which 1 would have been stopped" in text and "lost: 90 us per sample, loss 0.500" in text


def test_the_figures_are_drawn_also_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trials in ([], [trial(10, 2.0)], [trial(10, None, stopped="slow"), trial(9, 1.0, kind="dense")]):
            draw_front(trials).draw_without_rendering()
        curves = draw_curves()
        curves.draw_without_rendering()
    best, *others = curves.axes[0].lines
    assert (best.get_label(), best.get_color()) == ("the best so far", "#000000")
    assert all(best.get_zorder() > other.get_zorder() for other in others), "another trial took nearly the same"


def test_the_model_of_a_search_stops_the_slow_trials() -> None:
    full, stopped = search_lanes(), search_lanes(stop_after=0.8)
    assert [b.length for b in stopped if b.kind == "compute"] == [b.length for b in full if b.kind == "compute"]
    assert {b.length for b in stopped if b.kind == "wait"} == {0.8}
