"""Which lines make the batch in loops without a DataLoader: followed from the backward pass, without a clock.

Lines that make a batch are marked `# batch` in the loops below; no other line may be named.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gpulab.capture.loop_lines import LoopLines

DATA = torch.randn(64, 8)
NET = nn.Linear(8, 1)


def _back(lines: LoopLines, loss: Tensor) -> None:
    """As the hook of a backward pass does."""
    lines.backward(sys._getframe(1))
    loss.backward()  # type: ignore[no-untyped-call]


def draw(size: int) -> tuple[Tensor, Tensor]:
    """A batch function of the user's own."""
    rows = torch.randint(len(DATA), (size,))
    return DATA[rows], torch.zeros(size, 1)


def stream() -> Iterator[tuple[Tensor, Tensor]]:
    """A generator of the user's own."""
    while True:
        yield draw(4)


def batch_function(lines: LoopLines) -> None:
    """As nanoGPT: drawn between the forward and the backward pass."""
    x, y = draw(4)  # batch
    for _ in range(2):
        loss = mse_loss(NET(x), y)
        x, y = draw(4)  # batch
        _back(lines, loss)


def generator(lines: LoopLines) -> None:
    """A `for` over it."""
    for x, y in stream():  # batch
        out = NET(x)
        loss = mse_loss(out, y)
        _back(lines, loss)
        break


def asked_generator(lines: LoopLines) -> None:
    """`next` of it, and what is done with its batch."""
    batches = stream()  # batch
    x, y = next(batches)  # batch
    x = (x - x.mean()) / x.std()  # batch
    _back(lines, mse_loss(NET(x), y))


def indexed(lines: LoopLines) -> None:
    """Arrays sliced in the loop."""
    order = torch.randperm(len(DATA))  # batch
    for start in range(0, 8, 4):  # batch
        rows = order[start : start + 4]  # batch
        x = DATA[rows]  # batch
        loss = NET(x).square().mean()
        _back(lines, loss)


def filled_in_place(lines: LoopLines) -> None:
    """Item by item into a list and a tensor."""
    x, kept = torch.empty(4, 8), []  # batch
    for i in range(4):  # batch
        kept.append(DATA[i])  # batch
    x.copy_(torch.stack(kept))  # batch
    loss = NET(x).mean()
    _back(lines, loss)


def step_function(lines: LoopLines) -> None:
    """The batch comes in as arguments."""
    net = NET

    def train(x: Tensor, y: Tensor) -> None:
        loss = mse_loss(net(x), y)
        _back(lines, loss)

    x, y = draw(4)  # batch
    train(x, y)


def hidden_state(lines: LoopLines) -> None:
    """As word_language_model: what the network gave before is no data."""
    rnn, state = nn.RNN(8, 8), torch.zeros(1, 1, 8)
    for _ in range(2):
        x = DATA[:4].unsqueeze(1)  # batch
        state = state.detach()
        out, state = rnn(x, state)
        loss = out.mean()
        _back(lines, loss)


def taught(lines: LoopLines) -> None:
    """A teacher's answers are the training's work, in the loop or in a function."""
    teacher = nn.Linear(8, 1)

    def answers(x: Tensor) -> Tensor:
        with torch.no_grad():
            answer: Tensor = teacher(x)
            return answer

    x, _ = draw(4)  # batch
    with torch.no_grad():
        first = teacher(x)
    second = answers(x)
    loss = (NET(x) - first - second).mean()
    _back(lines, loss)


def on_one_line(lines: LoopLines) -> None:
    """The line makes the batch and trains on it: it is not known how much is which."""
    x, _ = draw(4); loss = NET(x).mean()  # fmt: skip  # noqa: E702
    _back(lines, loss)


def looked_into(lines: LoopLines) -> None:
    """Who asks for `locals()` may keep it: such a function is left alone."""
    x, _ = draw(4)
    loss = NET(x).mean()
    assert locals()
    _back(lines, loss)


def _marked(loop: Callable[..., Any]) -> set[int]:
    source, first = inspect.getsourcelines(loop)
    return {first + i for i, line in enumerate(source) if line.rstrip().endswith("# batch")}


LOOPS = (batch_function, generator, asked_generator, indexed, filled_in_place, step_function, hidden_state, taught)


@pytest.mark.parametrize("loop", [*LOOPS, on_one_line, looked_into])
def test_lines_that_make_the_batch_are_followed(loop: Callable[..., Any]) -> None:
    lines = LoopLines()
    loop(lines)
    source, first = inspect.getsourcelines(loop)
    names = {loop.__qualname__, f"{loop.__qualname__}.<locals>.train"}
    told = {
        line
        for line in range(first, first + len(source))
        for name in names
        if lines.makes_batch(((loop.__code__.co_filename, line, name),))
    }
    assert told == _marked(loop)


def test_a_loop_keeps_no_graph_for_us() -> None:
    lines = LoopLines()

    def references(read: bool) -> int:
        x, y = draw(4)
        loss = mse_loss(NET(x), y)
        if read:
            print(lines.backward(sys._getframe()), loss.requires_grad)  # type: ignore[func-returns-value]
        return sys.getrefcount(loss)

    assert references(read=True) == references(read=False)
    assert lines.make_batches
