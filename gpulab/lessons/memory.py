"""Lesson 06, memory: what fills it, a model of an allocator, checkpointing, convolutions with fewer FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gpulab.formatting import duration, factor, size
from gpulab.lessons.check import (
    Checked,
    Mistakes,
    Table,
    exercise,
    fault,
    right,
    seconds_of,
    time_pairs,
    wrong,
)
from gpulab.lessons.figures import A_MODEL, BLUE, ORANGE, Row, draw_rows, stacked
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.ranks import saved_activations
from gpulab.lessons.training import bytes_of, default_device, forward_and_backward, seeded
from gpulab.views.waiting import waiting
from gpulab.views.wording import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HALF = 0.6  # of the bytes saved without checkpoints: the most that correct checkpointing keeps


class Block(nn.Module):
    """A residual block of an MLP. `checkpointing`: its activations are recomputed in backward, not kept."""

    def __init__(self, width: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing and self.training:
            again: Tensor = checkpoint(self.layers, x, use_reentrant=False)
            return x + again
        out: Tensor = x + self.layers(x)
        return out


def deep_network(width: int = 128, depth: int = 8, *, checkpointing: bool = False) -> nn.Sequential:
    """64 pixels → 10 classes, with `depth` blocks between them."""
    blocks = [Block(width, checkpointing=checkpointing) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, width), *blocks, nn.Linear(width, 10))


# -- what fills it -----------------------------------------------------------------------------------------------------


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> dict[str, int]:
    """What a training step keeps, in bytes: weights, gradients, optimizer, activations (kept for the backward pass).

    Measured in one step on these inputs; afterwards, weights and optimizer are as after a step with learning rate 0.
    """
    optimizer.zero_grad()
    saved, loss = activation_bytes(model, lambda: functional.cross_entropy(model(inputs), labels))
    torch.autograd.backward(loss)
    gradients = sum(bytes_of(p.grad) for p in model.parameters() if p.grad is not None)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    state = sum(bytes_of(v) for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    optimizer.zero_grad()
    weights = sum(map(bytes_of, model.parameters()))
    return {"weights": weights, "gradients": gradients, "optimizer": state, "activations": saved}


def activation_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """The bytes that autograd saves in one forward pass, each piece of memory once, without weights; and its result."""
    with saved_activations(model) as saved:
        result = forward()
    return saved.now_bytes, result


_measured: dict[str, float] = {}  # shares for the guesses


def draw_state(model: nn.Module, data: Any, batch_sizes: Sequence[int]) -> Figure:
    """What a step with AdamW keeps by batch size, as measured: bars of weights, gradients, optimizer and activations.

    The share of activations with the largest batch is kept for the guess.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    with waiting("counting the bytes of a step with each batch size"):
        states = [
            state_bytes(model, optimizer, data.pixels[:count].to(device), data.labels[:count].to(device))
            for count in batch_sizes
        ]
    largest = states[batch_sizes.index(max(batch_sizes))]
    _measured["activations"] = largest["activations"] / sum(largest.values())
    colours = {"weights": "#4D4D4D", "gradients": PARTS["optimizer"].colour, "optimizer": ORANGE, "activations": BLUE}
    rows = [
        Row(f"batch of {count}", stacked((state[kind] / 2**20, colour) for kind, colour in colours.items()))
        for count, state in zip(batch_sizes, states, strict=True)
    ]
    return draw_rows(rows, "what one step keeps in memory", "MiB, measured", legend=colours)


def bytes_with_and_without(width: int, depth: int, data: Any, batch_size: int) -> Table:
    """The activations that a step keeps, in the baseline and with every block checkpointed; both train alike."""
    saved: list[int] = []
    gradients: list[Tensor] = []
    inputs, labels = data.pixels[:batch_size], data.labels[:batch_size]
    with waiting("counting the bytes of a step with and without checkpoints"):
        for checkpointing in (False, True):
            with seeded():
                model = deep_network(width, depth, checkpointing=checkpointing)
            activations, loss = activation_bytes(model, lambda: functional.cross_entropy(model(inputs), labels))  # noqa: B023
            torch.autograd.backward(loss)
            saved.append(activations)
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    _measured["kept"] = saved[1] / max(saved[0], 1)
    return Table(
        (
            f"baseline          {size(saved[0])} of activations",
            f"with checkpoints  {size(saved[1])}: {factor(saved[0] / max(saved[1], 1))} times less",
            f"largest difference of a gradient: {(gradients[0] - gradients[1]).abs().max().item():.3g}",
        )
    )


# -- the allocator, a model --------------------------------------------------------------------------------------------


class Allocator(Struct):
    """A model of a caching allocator: segments that it got from the device, cut into blocks, first fit.

    Sizes in MiB. `split`: a free block may be cut for a smaller request, as PyTorch does.
    """

    capacity: int = 100
    split: bool = True
    blocks: list[tuple[int, str]] = field(default_factory=list)  # size, name; "" is free
    fault: str = ""

    @property
    def reserved(self) -> int:
        return sum(size for size, _ in self.blocks)

    @property
    def allocated(self) -> int:
        return sum(size for size, name in self.blocks if name)

    def allocate(self, name: str, size: int) -> bool:
        """Take the first free block that is large enough, else memory of the device; False if neither exists."""
        for i, (free, owner) in enumerate(self.blocks):
            if not owner and free >= size:
                rest = [(free - size, "")] if self.split and free > size else []
                block_size = size if self.split else free
                self.blocks[i : i + 1] = [(block_size, name), *rest]
                return True
        if self.reserved + size > self.capacity:
            largest = max((free for free, owner in self.blocks if not owner), default=0)
            free_bytes = self.capacity - self.allocated
            self.fault = f"out of memory: {size} wanted, {free_bytes} free in all, {largest} in one piece"
            return False
        self.blocks.append((size, name))
        return True

    def free(self, name: str) -> None:
        """Give a block back to the cache; free neighbours become one."""
        merged: list[tuple[int, str]] = []
        for amount, owner in ((s, "" if o == name else o) for s, o in self.blocks):
            if merged and not merged[-1][1] and not owner:
                merged[-1] = (merged[-1][0] + amount, "")
            else:
                merged.append((amount, owner))
        self.blocks = merged


def fragmented() -> list[Allocator]:
    """The stages of batches with changing sizes: in the end enough memory is free, but no piece is large enough."""
    full = Allocator()
    for name, amount in (("A", 20), ("B", 15), ("C", 25), ("D", 15), ("E", 20)):
        full.allocate(name, amount)
    holes = deepcopy(full)
    for name in ("A", "C", "E"):
        holes.free(name)
    failing = deepcopy(holes)
    failing.allocate("F", 40)
    return [full, holes, failing]


def draw_allocators(stages: Iterable[Allocator]) -> Figure:
    """The blocks of each stage in a row; it says that it is a model."""
    rows = []
    for number, allocator in enumerate(stages, start=1):
        bars = stacked((amount, BLUE if name else "#E3E3E3") for amount, name in allocator.blocks)
        labelled = [
            replace(bar, label=f"{name or 'free'} {amount}", ink="white" if name else "black")
            for bar, (amount, name) in zip(bars, allocator.blocks, strict=True)
        ]
        rows.append(Row(f"stage {number}", labelled))
        rows += [Row("", (), allocator.fault)] if allocator.fault else []
    figure = draw_rows(rows, "blocks of a caching allocator", "MiB", note=A_MODEL)
    figure.axes[0].set_xlim(0, 100)
    return figure


# -- fewer FLOPs -------------------------------------------------------------------------------------------------------


def convolutions(channels: int = 64) -> dict[str, nn.Module]:
    """Three convolutions with `channels`: ordinary, depthwise-separable, inverted residual (expanded 4 times)."""
    wide = 4 * channels
    return {
        "ordinary": nn.Conv2d(channels, channels, 3, padding=1),
        "depthwise-separable": nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.Conv2d(channels, channels, 1)
        ),
        "inverted residual": nn.Sequential(
            nn.Conv2d(channels, wide, 1),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide),
            nn.ReLU6(),
            nn.Conv2d(wide, channels, 1),
        ),
    }


def convolution_table(channels: int = 64, pixels: int = 32, batch: int = 8) -> Table:
    """Parameters, FLOP, kept bytes and time of a forward and backward pass of each convolution, measured in turn."""
    device = default_device()
    x = torch.randn(batch, channels, pixels, pixels, device=device)
    modules = {name: module.to(device) for name, module in convolutions(channels).items()}
    with waiting("measuring three kinds of convolution"):
        rows = [_convolution_row(name, module, modules["ordinary"], x) for name, module in modules.items()]
    head = ("convolution", "parameters", "MFLOP", "kept", "time", "against the ordinary one")
    return Table.of(head, rows)


def _convolution_row(name: str, module: nn.Module, ordinary: nn.Module, x: Tensor) -> tuple[str, ...]:
    parameters = sum(p.numel() for p in module.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    saved, _ = activation_bytes(module, lambda: module(x).sum())
    before, after = (seconds_of(partial(forward_and_backward, m, x)) for m in (ordinary, module))
    speed = time_pairs(before, after, pairs=5, budget_s=6.0)
    words = "" if name == "ordinary" else speed.words
    mega = counter.get_total_flops() / 1e6
    return name, f"{parameters:,}", f"{mega:.0f}", size(saved), duration(1e6 * speed.after_s), words


# -- a graph that is kept ----------------------------------------------------------------------------------------------


def activations_of_losses(steps: int, *, with_graph: bool) -> Table:
    """The bytes that a list of losses holds after so many steps: with their graphs, or as plain numbers."""
    model = deep_network(64, 2)
    x, labels = torch.randn(32, 64), torch.randint(10, (32,))
    losses: list[object] = []
    saved = 0
    with waiting("counting the bytes that losses hold"):
        for _ in range(steps):
            activations, loss = activation_bytes(model, lambda: functional.cross_entropy(model(x), labels))
            losses.append(loss if with_graph else loss.item())
            saved += activations if with_graph else 0
    what = "losses with their graphs" if with_graph else "losses as numbers"
    return Table((f"after {steps} steps, {what}: {size(saved)} of activations are kept",))


# -- needless copies ---------------------------------------------------------------------------------------------------


def activations_of_each(model: nn.Module, forwards: Mapping[str, Callable[[], Tensor]]) -> Table:
    """The bytes of activations that each of `forwards` keeps; the weights of `model` are not counted."""
    with waiting("counting the bytes of each forward pass"):
        saved = {name: activation_bytes(model, forward)[0] for name, forward in forwards.items()}
    return Table.of(("", "activations"), [(name, size(amount)) for name, amount in saved.items()])


# -- the exercises -----------------------------------------------------------------------------------------------------


def _count(model: nn.Module, rule: Callable[[nn.Parameter], int]) -> int:
    return sum(map(rule, model.parameters()))


def _adamw_bytes(model: nn.Module) -> int:
    return _count(model, lambda p: bytes_of(p) * (4 if p.requires_grad else 1))


STATE_MISTAKES: Mistakes = (
    ("A frozen parameter still has its weights.", lambda m: _count(m, lambda p: 4 * bytes_of(p) * p.requires_grad)),
    (
        "Not every number has four bytes: ask the parameter for its element_size().",
        lambda m: _count(m, lambda p: p.numel() * (16 if p.requires_grad else 4)),
    ),
    ("A frozen parameter has no gradient and no averages.", lambda m: _count(m, lambda p: 4 * bytes_of(p))),
    ("A frozen parameter has no gradient and no averages.", lambda m: _count(m, lambda p: 16 * p.numel())),
    (
        "Those are the weights alone: gradients and the optimizer's averages come on top.",
        lambda m: _count(m, bytes_of),
    ),
    ("AdamW keeps two averages of each gradient, too.", lambda m: _count(m, lambda p: 2 * bytes_of(p))),
    (
        "AdamW keeps two averages of each gradient, too.",
        lambda m: _count(m, lambda p: bytes_of(p) * (1 + p.requires_grad)),
    ),
    ("Weight, gradient, and how many averages?", lambda m: _count(m, lambda p: 3 * bytes_of(p))),
    ("That is a count of numbers; how many bytes has each?", lambda m: _count(m, lambda p: 4 * p.numel())),
)


@exercise()
def check_state(adamw_bytes: Any) -> Checked:
    """Whether `adamw_bytes(model)` returns weights + gradients + AdamW's state of the parameters that are trained."""
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    frozen[0].requires_grad_(False)
    for words, model in (
        ("of 32-bit weights", nn.Linear(10, 3)),
        ("whose first layer is frozen", frozen),
        ("of 16-bit weights", nn.Linear(6, 6).to(torch.bfloat16)),
    ):
        hint = fault(
            adamw_bytes,
            _adamw_bytes,
            [(model,)],
            STATE_MISTAKES,
            otherwise="Weights, gradients and two averages, each in the bytes of its parameter.",
            same=lambda got, expected: abs(got - expected) <= 64,  # AdamW's count of steps is a number per parameter
        )
        if hint:
            return wrong(f"For a model {words}: expected {_adamw_bytes(model):,}. {hint}")
    return right("Four times the bytes of each trained parameter: weight, gradient and two averages.")


@exercise()
def check_checkpointing(my_network: Any) -> Checked:
    """Whether `my_network(blocks)` returns a module equal to the blocks that keeps far less for backward."""
    with seeded():
        blocks = [Block(16).double() for _ in range(6)]
        x = torch.randn(32, 16, dtype=torch.float64, requires_grad=True)
    plain = nn.Sequential(*blocks)
    mine = my_network(blocks)
    if not callable(mine):
        return wrong(f"It gives a {type(mine).__name__}; expected a module (or a function of x).")
    expected_bytes, expected = activation_bytes(plain, lambda: plain(x).square().mean())
    my_bytes, got = activation_bytes(plain, lambda: mine(x).square().mean())
    if not torch.allclose(got, expected):
        return wrong("It computes something else than the blocks, one after the other. Does each block run once?")
    tensors = [x, *plain.parameters()]
    my_gradients: Sequence[Tensor | None] = torch.autograd.grad(got, tensors, allow_unused=True)
    right_gradients = torch.autograd.grad(expected, tensors)
    for ours, theirs in zip(my_gradients, right_gradients, strict=True):
        if ours is None:
            return wrong("Some weights get no gradient: was something detached, or computed under no_grad?")
        if not torch.allclose(ours, theirs):
            return wrong("The gradients are not those of the blocks.")
    if my_bytes > HALF * expected_bytes:
        return wrong(
            f"It still keeps {size(my_bytes)} for backward, against {size(expected_bytes)} of the blocks as they are. "
            "Wrap each block: checkpoint(block, x, use_reentrant=False)."
        )
    return right(f"The same result and gradients, {size(my_bytes)} kept instead of {size(expected_bytes)}.")


QUESTIONS: Mapping[str, Question] = {
    "activations": share(
        "What share of a step's memory are activations, with batches of 512?",
        lambda: _measured.get("activations"),
        "of what a step with batches of 512 keeps are activations",
    ),
    "kept": share(
        "What share of the activations does a step still keep with checkpoints?",
        lambda: _measured.get("kept"),
        "of the activations are kept with checkpoints",
    ),
    "checkpointing": times(
        "What speedup does checkpointing give? (0.5: 2× slower)",
        "checkpointing",
        "with checkpointing",
    ),
    "copies": times(
        "What speedup does dropping the needless copies give?",
        "copies",
        "without needless copies",
    ),
}
