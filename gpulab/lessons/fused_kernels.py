"""Lesson 08, fused kernels: attention in four operators and in one, and a roofline of the learner's own operators."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from gpulab.formatting import duration, percent, speedup
from gpulab.lessons.check import (
    Checked,
    Mistakes,
    Note,
    NotMeasured,
    Table,
    check_speed,
    exercise,
    fault,
    seconds_of,
    time_pairs,
    wait_for_gpu,
    wrong,
)
from gpulab.lessons.figures import BLUE, GREY, GRID, ORANGE, plot, shortened
from gpulab.lessons.guesses import Question, times
from gpulab.lessons.lanes import Block, Lane
from gpulab.lessons.measured import latest_experiment, times_faster
from gpulab.lessons.training import default_device, forward_and_backward, gradients_of
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

LEAST_SPEEDUP = 1.1  # speedup: forward and backward, at the size of the check
SHAPES = ((2, 2, 8, 4), (1, 3, 17, 8))  # batch, heads, tokens, head size
TIMED_SHAPE = (4, 4, 256, 32)
TOLERANCE = 1e-9  # in double precision
PEAK_SIZE, COPIED_BYTES, REPEATS = 1024, 64 << 20, 5
_LEAST_SHARE = 0.01  # share of the step: smaller parts are not drawn
_NAME_FROM_SHARE, _MOST_NAMES, _LONGEST_NAME = 0.03, 10, 30  # in the figure; the table below has all names in full


def four_operators(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention as in a textbook: product, scale and mask, softmax, product. [batch, heads, tokens, size]."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    tokens = query.shape[-2]
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    return torch.softmax(scores.masked_fill(later, -math.inf), dim=-1) @ value


def one_operator(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same by PyTorch's own operator, which need not write the matrix of scores to memory."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention_lanes(sequences: int = 8, heads: int = 4, tokens: int = 256, size: int = 16) -> dict[str, list[Block]]:
    """MB of 32-bit numbers that a layer's attention reads and writes in the forward pass, without caches.

    Each operator reads its inputs once and writes its result once. The matrix of scores has a number for each pair of
    tokens; query, key, value and the result have `size` for each token.
    """
    scores = sequences * heads * tokens * tokens * 4 / 1e6
    small = sequences * heads * tokens * size * 4 / 1e6
    lane = Lane()
    lane.add(2 * small, "compute")
    for count, label in ((1, "product"), (2, "scale and mask"), (2, "softmax"), (1, "product")):
        lane.add(count * scores, "wait", label)
    lane.add(2 * small, "compute")
    return {"four operators": lane.blocks, "one operator": [Block(0.0, 4 * small, "compute")]}


class Layer(nn.Module):
    """One layer of a small transformer, with `attention`."""

    def __init__(self, width: int, heads: int, attention: Attention) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.inputs(self.before(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = self.attention(query, key, value).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.outputs(mixed)
        out: Tensor = x + self.feed(self.between(x))
        return out


class Transformer(nn.Module):
    """Predicts the next token of `vocabulary`. `attention` is called by every layer."""

    def __init__(self, attention: Attention, *, vocabulary: int = 64, width: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(Layer(width, heads, attention) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def counting_tokens(sequences: int, length: int, vocabulary: int = 64) -> Tensor:
    """Sequences that count upwards from a random start, int64 [sequences, length + 1]: there is something to learn."""
    start = torch.randint(vocabulary, (sequences, 1), generator=torch.Generator().manual_seed(0))
    return (start + torch.arange(length + 1)) % vocabulary


# -- the roofline ------------------------------------------------------------------------------------------------------


class Peak(Struct, frozen=True):
    """The device's measured peak: FLOP/s of one large matrix product, bytes/s of one large copy, read and written."""

    flops: float
    bytes: float

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic, not memory, is the limit."""
        return self.flops / self.bytes


class OperatorUse(Struct, frozen=True):
    """All calls of one operator in a step. `flops` counts products and convolutions, else one per number written."""

    name: str
    calls: int
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOP per byte read or written."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def gflops_per_s(self) -> float:
        return self.flops / self.seconds / 1e9


class OperatorMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up time, FLOP and bytes of every operator in its block. Small operators appear slower than they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uses: dict[str, list[float]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wait_for_gpu()
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        wait_for_gpu()
        seconds = time.perf_counter() - began
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        outputs = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        if outputs and (func._schema.is_mutable or not _is_view(inputs, outputs)):
            moved = sum(x.numel() * x.element_size() for x in (*inputs, *outputs))
            use = self._uses.setdefault(str(func.overloadpacket), [0, 0.0, 0.0, 0.0])
            for i, amount in enumerate((1, _flops(func, args, kwargs, result, outputs), moved, seconds)):
                use[i] += amount
        return result

    @property
    def uses(self) -> list[OperatorUse]:
        """The operators, the longest first."""
        every = (OperatorUse(name, int(use[0]), *use[1:]) for name, use in self._uses.items())
        return sorted(every, key=lambda use: -use.seconds)


def _flops(func: Any, args: Any, kwargs: Any, result: Any, outputs: Sequence[Tensor]) -> float:
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        return float(count(*args, **(kwargs or {}), out_val=result))
    return float(sum(x.numel() for x in outputs))


def _is_view(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether an operator moves no data: reshape, transpose, detach."""
    there = {x.untyped_storage().data_ptr() for x in inputs}
    return all(x.untyped_storage().data_ptr() in there for x in outputs)


def operators_of(step: Callable[[], object]) -> list[OperatorUse]:
    """The operators of one call of `step`, forward and backward; a call before it warms up."""
    with waiting("measuring every operator of a step"):
        step()
        with OperatorMeter() as meter:
            step()
    uses: list[OperatorUse] = meter.uses
    return uses


def measured_peak(device: torch.device) -> Peak:
    """The best of a few tries: one 32-bit matrix product, one copy."""
    with waiting("measuring the peak of this device"):
        a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device=device) for _ in range(2))
        source = torch.zeros(COPIED_BYTES // 4, device=device)
        target = torch.empty_like(source)
        product_s, copy_s = (
            min(seconds_of(work)() for _ in range(1 + REPEATS))
            for work in (lambda: torch.mm(a, b), lambda: target.copy_(source))
        )
    return Peak(2 * PEAK_SIZE**3 / product_s, 2 * COPIED_BYTES / copy_s)


def draw_roofline(uses: Sequence[OperatorUse], peak: Peak) -> Figure:
    """FLOP/s against FLOP per byte: the roof is the device's measured peak, each dot an operator and its share."""
    step_s = sum(use.seconds for use in uses)
    longest_first = sorted(uses, key=lambda use: -use.seconds)
    uses_to_draw = [use for use in longest_first if use.seconds >= _LEAST_SHARE * step_s and use.flops and use.bytes]
    intensities = [use.intensity for use in uses_to_draw] or [1.0]
    low, high = min(*intensities, peak.ridge) / 4, max(*intensities, peak.ridge) * 4
    title = "your operators under the roof that this device reached"
    with plot(8, 4, title, "FLOP per byte read or written", "GFLOP/s") as (figure, axes):
        roof = [low * peak.bytes / 1e9, peak.flops / 1e9, peak.flops / 1e9]
        axes.plot([low, peak.ridge, high], roof, color=GREY, lw=2)
        for use in uses_to_draw:
            colour = BLUE if use.intensity >= peak.ridge else ORANGE
            area = _area(use.seconds / step_s)
            axes.scatter([use.intensity], [use.gflops_per_s], s=area, color=colour, alpha=0.6, linewidths=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(y=0.12)
        axes.grid(color=GRID, lw=0.5, which="major")
        _name_dots(axes, uses_to_draw, step_s)
    return figure


def _area(share: float) -> float:
    """The area of an operator's dot, in square points."""
    return 30 + 1500 * share


def _name_dots(axes: Axes, uses_to_draw: Sequence[OperatorUse], step_s: float) -> None:
    """The names and shares of the large dots in a column next to the axes, each with a line to its dot."""
    largest = [use for use in uses_to_draw[:_MOST_NAMES] if use.seconds >= _NAME_FROM_SHARE * step_s]
    line = {"arrowstyle": "-", "color": GREY, "lw": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}
    for place, use in enumerate(sorted(largest, key=lambda use: use.gflops_per_s)):
        name = shortened(use.name.removeprefix("aten."), _LONGEST_NAME)
        axes.annotate(
            f"{name} {percent(use.seconds / step_s)}",
            (use.intensity, use.gflops_per_s),
            (1.02, (place + 0.5) / len(largest)),
            textcoords=axes.transAxes,
            va="center",
            size=8,
            arrowprops=line,
            annotation_clip=False,
        )


def operator_table(uses: Sequence[OperatorUse], rows: int = 8) -> Table:
    """The operators that take longest."""
    step_s = sum(use.seconds for use in uses)
    cells = (
        (
            use.name[:42],
            use.calls,
            duration(1e6 * use.seconds),
            percent(use.seconds / step_s) if step_s else "–",
            f"{use.intensity:.2f}",
        )
        for use in uses[:rows]
    )
    return Table.of(("operator", "calls", "time", "share", "FLOP per byte"), cells)


# -- the compiler ------------------------------------------------------------------------------------------------------


def _chain(x: Tensor) -> Tensor:
    """Five operators in a row, each of which reads and writes all numbers."""
    return torch.tanh(x * 2.0 + 1.0).sigmoid() * x


def compile_chain(size: int = 2_000_000) -> Table | Note:
    """Compile a chain of small operators: the seconds it took, and its time per call eager and compiled, interleaved.

    If this machine cannot compile (the CPU needs a C++ compiler), a sentence says so.
    """
    x = torch.randn(size, device=default_device())
    compiled = torch.compile(_chain, dynamic=False)
    began = time.perf_counter()
    try:
        with waiting("compiling a chain of five operators"):
            same = torch.allclose(compiled(x), _chain(x), rtol=1e-4, atol=1e-5)
    except Exception as e:  # whatever the compiler lacks is not a topic of the lesson
        return Note(
            "Not compiled.", f"torch.compile does not work on this machine ({type(e).__name__}): see its message."
        )
    seconds = time.perf_counter() - began
    speed = time_pairs(seconds_of(lambda: _chain(x)), seconds_of(lambda: compiled(x)))
    return Table(
        (
            f"compiled once in {seconds:.1f} s; the same results: {same}",
            f"eager {duration(1e6 * speed.before_s)}, compiled {duration(1e6 * speed.after_s)} per call",
            speed.words,
        )
    )


def swaps_table(names: Mapping[str, str]) -> Table:
    """The effect of each swap on the whole step, by the experiment's name; `names`: the lesson's names of the swaps."""
    rows: list[tuple[str, str, str]] = []
    for name, words in names.items():
        try:
            rows.append((words, speedup(times_faster(name).times), latest_experiment(name).comparisons[0].verdict))
        except NotMeasured:
            rows.append((words, "–", "not measured: run its cell first"))
    return Table.of(("swap", "step", "verdict"), rows)


# -- the exercise ------------------------------------------------------------------------------------------------------


ATTENTION_MISTAKES: Mistakes = (
    (
        "Every token sees the tokens that come after it: the mask is missing. Which argument makes it causal?",
        lambda query, key, value: functional.scaled_dot_product_attention(query, key, value),
    ),
    (
        "The scores are not divided by the square root of a head's size: leave scale alone.",
        lambda query, key, value: one_operator(query * math.sqrt(query.shape[-1]), key, value),
    ),
    (
        "The scores are divided by the square root of a head's size twice: leave scale alone.",
        lambda query, key, value: one_operator(query / math.sqrt(query.shape[-1]), key, value),
    ),
    (
        "Heads and tokens are exchanged: it attends over the second last dimension, which must be that of the tokens.",
        lambda *inputs: one_operator(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2),
    ),
    ("query and key are exchanged.", lambda query, key, value: one_operator(key, query, value)),
)


@exercise()
def check_attention(my_attention: Any) -> Checked:
    """Whether `my_attention(query, key, value)` is the four operators' causal attention, and faster."""
    cases = [tuple(_inputs(shape, torch.float64)) for shape in SHAPES]
    otherwise = (
        "Its results differ from those of the four operators, in another way than a missing mask or another scale."
    )
    if words := fault(
        my_attention, four_operators, cases, ATTENTION_MISTAKES, otherwise=otherwise, form=_form, same=_same
    ):
        return wrong(words)
    for inputs in cases:
        mine, expected = (gradients_of(attention(*inputs), inputs) for attention in (my_attention, four_operators))
        for name, gradient, right_one in zip(("query", "key", "value"), mine, expected, strict=True):
            if gradient is None:
                return wrong(
                    f"The results are right, but {name} gets no gradient, so nothing before it would learn. Is "
                    "something detached, or inside torch.no_grad()?"
                )
            if not _same(gradient, right_one):
                return wrong(f"The results are right, but the gradient of {name} is not that of the four operators.")
    inputs = tuple(_inputs(TIMED_SHAPE, torch.float32))
    return check_speed(
        lambda: forward_and_backward(four_operators, *inputs),
        lambda: forward_and_backward(my_attention, *inputs),
        LEAST_SPEEDUP,
        good="Results and gradients are the same.",
        hint="The results are right. Is it one call of PyTorch, or are scores still written to memory?",
        pairs=9,
    )


def _form(got: object, expected: Tensor) -> str:
    if not isinstance(got, Tensor):
        return f"It gives a {type(got).__name__}; expected a tensor: does the function return its result?"
    if got.shape != expected.shape:
        return (
            f"Its result has the shape {list(got.shape)} and should have {list(expected.shape)}, as value has: "
            "[batch, heads, tokens, numbers of a head]."
        )
    return ""


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def _inputs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random, dtype=dtype).requires_grad_() for _ in range(3)]


QUESTIONS: Mapping[str, Question] = {
    "attention": times(
        "What speedup of the whole step does attention in one operator give?",
        "one-operator",
        "with attention in one operator",
    ),
    "optimizer": times(
        "What speedup of the whole step does a fused optimizer give?", "fused-optimizer", "with a fused optimizer"
    ),
}
