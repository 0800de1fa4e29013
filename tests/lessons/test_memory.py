"""Lesson 06: bytes that are counted, an allocator that is a model, and two exercises."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpulab.formatting import size
from gpulab.lessons.digits import DigitsInMemory
from gpulab.lessons.memory import (
    Allocator,
    activations_of_each,
    activations_of_losses,
    bytes_with_and_without,
    convolutions,
    draw_allocators,
    fragmented,
    state_bytes,
)


@pytest.fixture(scope="module")
def digits() -> DigitsInMemory:
    return DigitsInMemory()


def test_what_a_step_keeps_is_counted(digits: DigitsInMemory) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    small, large = (state_bytes(model, optimizer, digits.pixels[:n], digits.labels[:n]) for n in (10, 40))
    weights = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    assert small["weights"] == small["gradients"] == weights
    assert 2 * weights <= small["optimizer"] <= 2 * weights + 64, "two averages, and a count of steps each"
    assert (small["weights"], small["optimizer"]) == (large["weights"], large["optimizer"])
    assert small["activations"] >= 4 * 10 * (64 + 32)
    per_sample = (large["activations"] - small["activations"]) / 30
    assert per_sample == pytest.approx(small["activations"] / 10, rel=0.05), "a straight line over the batch"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "nothing was trained"


def test_checkpoints_keep_less_and_train_alike(digits: DigitsInMemory) -> None:
    state = torch.get_rng_state()
    lines = repr(bytes_with_and_without(32, 4, digits, 64)).splitlines()
    assert "times less" in lines[1] and lines[2].endswith(": 0")
    assert torch.equal(state, torch.get_rng_state())


def test_kept_graphs_grow_and_numbers_do_not() -> None:
    assert ": 0 bytes of activations" in repr(activations_of_losses(5, with_graph=False))
    assert repr(activations_of_losses(5, with_graph=True)) != repr(activations_of_losses(50, with_graph=True))


def test_a_copy_is_kept_beside_what_it_copies() -> None:
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(16, 8)

    def forward(copied: bool) -> Tensor:
        y = x
        for layer in layers:
            y = torch.relu(layer(y))
            y = y.clone() if copied else y
        return y

    table = activations_of_each(layers, {"copies": lambda: forward(True), "none": lambda: forward(False)})
    each = 16 * 8 * 4  # bytes of a result: the input and three results; a copy of each that a layer reads
    assert [line.split()[:3] for line in table.lines[1:]] == [
        ["copies", *size(6 * each).split()],
        ["none", *size(4 * each).split()],
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 9)), max_size=40), st.booleans())
def test_blocks_never_overlap_and_never_exceed_the_device(requests: list[tuple[bool, int, int]], split: bool) -> None:
    allocator = Allocator(split=split)
    owned: dict[str, int] = {}
    for number, (free, amount, which) in enumerate(requests):
        if free and owned:
            name = sorted(owned)[which % len(owned)]
            allocator.free(name)
            del owned[name]
        elif allocator.allocate(f"t{number}", amount):
            owned[f"t{number}"] = amount
        assert allocator.allocated >= sum(owned.values()) and allocator.reserved <= allocator.capacity
        assert not split or allocator.allocated == sum(owned.values())
        free_neighbours = [not a and not b for (_, a), (_, b) in pairwise(allocator.blocks)]
        assert not any(free_neighbours) or not split


def test_memory_that_is_free_may_not_be_enough() -> None:
    *_, last = fragmented()
    assert last.fault == "out of memory: 40 wanted, 70 free in all, 25 in one piece"
    assert last.fault in [text.get_text() for text in draw_allocators(fragmented()).axes[0].texts]


def test_another_order_of_requests_leaves_one_piece() -> None:
    """What the lesson says of its own case: the largest batch first."""
    small_first, large_first = Allocator(), Allocator()
    for allocator, requests in (
        (small_first, (("weights", 30), ("batch 1", 25), ("batch 2", 35))),
        (large_first, (("weights", 30), ("batch 2", 35), ("batch 1", 25))),
    ):
        for name, mebibytes in requests:
            allocator.allocate(name, mebibytes)
        allocator.free(requests[1][0])
    assert not small_first.allocate("batch 3", 30)
    assert large_first.allocate("batch 3", 30)


def test_convolutions_give_the_same_shape() -> None:
    x = torch.randn(2, 16, 8, 8)
    assert {tuple(module(x).shape) for module in convolutions(16).values()} == {(2, 16, 8, 8)}
