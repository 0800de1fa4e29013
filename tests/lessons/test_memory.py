"""Lesson 06: peaks of real runs, what is let go of, a fit with little memory, and an allocator that is a model."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from gpulab.lessons import memory
from gpulab.lessons.check import Note
from gpulab.lessons.memory import (
    Allocator,
    check_free,
    convolutions,
    deep_network,
    draw_allocators,
    draw_peaks,
    fit_in_little_memory,
    fragmented,
)
from gpulab.memory_record import Growth, Holding, Ledger, MemoryAccount

TRAINING = """
batch_size = 512
network = deep_network(width=128, depth=8).to(device)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(digits.pixels, digits.labels), batch_size=batch_size)
for pixels, labels in loader:
    loss = functional.cross_entropy(network(pixels), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
little = pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space")


def ran(monkeypatch: pytest.MonkeyPatch, code: str, account: MemoryAccount | None = None, **names: Any) -> None:
    """Make it the latest run of every name, in a notebook with these variables."""
    monkeypatch.setattr(memory, "latest_run", lambda name: SimpleNamespace(code=code, memory_account=account))
    monkeypatch.setattr(memory, "notebook", lambda: (SimpleNamespace(), names))


def test_only_activations_grow_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # a ledger counts what earlier tests have left until it is collected
    names: dict[str, Any] = {"deep_network": deep_network, "device": torch.device("cpu")}
    exec(memory._IMPORTS, names)
    digits = SimpleNamespace(pixels=torch.randn(1600, 64), labels=torch.randint(10, (1600,)))
    ran(monkeypatch, TRAINING, digits=digits, **names)
    figure = draw_peaks("as-written", (256, 512))
    assert not isinstance(figure, Note)
    patches = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    bars = [(round(bar.get_y(), 2), bar.get_width()) for bar in patches if bar.get_width() > 0.1]
    rows = [[width for at, width in bars if at == row] for row in sorted({at for at, _ in bars})]
    small, large = sorted(rows, key=sum)
    assert len(small) == len(large)
    grown = [(a, b) for a, b in zip(small, large, strict=True) if b > 1.01 * a]
    assert len(grown) == 1 and grown[0][1] == pytest.approx(2 * grown[0][0], rel=0.1)
    assert sum(small) - grown[0][0] == pytest.approx(sum(large) - grown[0][1], rel=0.02)


@pytest.mark.parametrize("rerun", [True, False])
def test_what_is_still_held_is_named(monkeypatch: pytest.MonkeyPatch, rerun: bool) -> None:
    growth = Growth("features", 4e6, 3)
    ledger = Ledger("cpu", 9, "update", (Holding("variables", "features", 12_000_000),))
    account = MemoryAccount((ledger,), growth=() if rerun else (growth,), rerun=growth if rerun else None)
    outputs = {7: torch.ones(1_000_000)}
    ran(monkeypatch, "", account, features=[torch.ones(2_000_000)], Out=outputs, _7=outputs[7])
    assert check_free(...).state == "unanswered"
    assert "not 'hidden'" in check_free("hidden").hint
    checked = check_free("features")
    assert checked.state == "wrong" and "features still holds 7.63 MiB: del features" in checked.hint
    ran(monkeypatch, "", account, Out={}, _7=outputs.pop(7))
    checked = check_free("features")
    assert checked.state == "wrong" and "Out still holds 3.81 MiB: %gpulab memory --free out" in checked.hint
    ran(monkeypatch, "", account)
    checked = check_free("features")
    assert checked.state == "right" and "features held 11.4 MiB in the last run" in checked.hint


def test_a_run_without_growth_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for account in (None, MemoryAccount()):
        ran(monkeypatch, "", account)
        assert check_free("features").state == "unanswered"


@little
@pytest.mark.slow("a real search for the batch that fits into little memory")
def test_checkpointing_makes_the_batch_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, TRAINING)
    words = repr(fit_in_little_memory("as-written", 4096, 160))
    assert "fit of batch_size (now 4,096)" in words and "limit: RLIMIT_AS" in words
    assert "checkpointing=on with batch_size=4,096 fits" in words and "predicted not to fit" in words


@little
def test_a_process_that_ends_early_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ran(monkeypatch, TRAINING.replace("loss.backward()", "loss.backwards()"))
    note = fit_in_little_memory("as-written", 64, 160)
    assert isinstance(note, Note) and "has no attribute 'backwards'" in note.words


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
