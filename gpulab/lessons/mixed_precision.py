"""Lesson 07, mixed precision: number formats, gradients that vanish in 16 bits, and a training step with GradScaler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from msgspec import Struct, field
from torch import Tensor, nn
from torch.nn import functional

from gpulab.formatting import duration, factor, percent
from gpulab.lessons.check import (
    Checked,
    NotMeasured,
    Speed,
    Table,
    exercise,
    right,
    seconds_of,
    time_pairs,
    wrong,
)
from gpulab.lessons.digits import DigitsInMemory
from gpulab.lessons.figures import BARE, BLUE, GREY, GRID, ORANGE, PALE, Bar, Row, draw_rows, plot
from gpulab.lessons.guesses import Question, share, times
from gpulab.lessons.measured import latest_experiment, latest_facts, notes, product_share
from gpulab.lessons.training import RecordingScaler, default_device, one_thread, seeded
from gpulab.verdict import is_decided
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AmpStep: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, Tensor, Tensor], object]

LOSS_WEIGHT = 1e-4  # of the loss whose gradients vanish
_COLOURS = {"fp32": "#222222", "fp16": ORANGE, "fp16, scaled": "#1E7B45", "bf16": BLUE}


# -- the formats -------------------------------------------------------------------------------------------------------


class Format(Struct, frozen=True):
    """A binary floating-point format: one sign bit, the other bits are exponent and fraction."""

    name: str
    exponent_bits: int
    fraction_bits: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype) -> Format:
        """The format of a dtype, from torch.finfo."""
        info = torch.finfo(dtype)
        fraction = -round(math.log2(info.eps))
        return cls(name, info.bits - 1 - fraction, fraction)

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def largest_log2(self) -> float:
        """The logarithm to base 2 of its largest number."""
        return (1 << self.exponent_bits - 1) - 1 + math.log2(2 - 2.0**-self.fraction_bits)

    @property
    def smallest_log2(self) -> int:
        """The logarithm to base 2 of its smallest positive number (subnormal, with fewer digits)."""
        return 2 - (1 << self.exponent_bits - 1) - self.fraction_bits


FORMATS: tuple[Format, ...] = (
    Format.of("fp32", torch.float32),
    Format("TF32", 8, 10),  # not a torch dtype: used by tensor cores for fp32
    Format.of("fp16", torch.float16),
    Format.of("bf16", torch.bfloat16),
)


def format_table() -> Table:
    """Bits, range and precision of each format."""
    rows = []
    for one in FORMATS:
        smallest, largest = (f"{2.0**log2:.1e}" for log2 in (one.smallest_log2, one.largest_log2))
        after = f"{1 + 2.0**-one.fraction_bits:.7f}"
        rows.append((one.name, one.bits, one.exponent_bits, one.fraction_bits, smallest, largest, after))
    return Table.of(("", "bits", "exponent", "fraction", "smallest > 0", "largest", "next after 1"), rows)


def draw_formats() -> Figure:
    """The range of each format as a bar over the powers of ten, and the digits that it keeps of a number."""
    rows = []
    for one in FORMATS:
        low, high = one.smallest_log2 * math.log10(2), one.largest_log2 * math.log10(2)
        digits = f"{one.bits} bits, {(one.fraction_bits + 1) * math.log10(2):.1f} digits"
        rows.append(Row(one.name, [Bar(low, high - low, _COLOURS.get(one.name, GREY))], digits))
    figure = draw_rows(rows, "the numbers above zero that each format can hold", row_in=0.34)
    figure.axes[0].set_xticks(range(-40, 41, 10), [f"1e{power}" for power in range(-40, 41, 10)])
    return figure


# -- what autocast casts -----------------------------------------------------------------------------------------------


OPERATORS: Mapping[str, Callable[[Tensor], Tensor]] = {  # of a matrix of positive numbers, 8 x 8
    "matmul": lambda x: x @ x,
    "linear": lambda x: functional.linear(x, x),
    "conv2d": lambda x: functional.conv2d(x[None, None], x[:3, :3][None, None]),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: functional.layer_norm(x, (8,)),
    "exp": torch.exp,
    "log": torch.log,
    "pow": lambda x: x.pow(2),
    "sum": torch.sum,
    "cumsum": lambda x: x.cumsum(0),
    "prod": torch.prod,
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(8, device=x.device)),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "relu": torch.relu,
    "gelu": functional.gelu,
    "max_pool2d": lambda x: functional.max_pool2d(x[None], 2),
}
OF_TWO: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "cat": lambda a, b: torch.cat((a, b)),
    "stack": lambda a, b: torch.stack((a, b)),
}


def autocast_table(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Table:
    """Which operators autocast computes in `dtype`, which in fp32, which in their inputs' format: tried one by one."""

    def result(name: str, dtype: torch.dtype) -> torch.dtype | None:
        """The format of the result; None if the device has no such operator for that format."""
        with suppress(RuntimeError, NotImplementedError):
            return OPERATORS[name](torch.rand(8, 8, device=device).add(0.5).to(dtype)).dtype
        return None

    with torch.random.fork_rng(), torch.autocast(device.type, dtype=dtype):
        both = {name: (result(name, torch.float32), result(name, dtype)) for name in OPERATORS}
        pair = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device, dtype=dtype)
        widest = [name for name, operator in OF_TWO.items() if operator(*pair).dtype is torch.float32]
    lower = [name for name, (from_fp32, _) in both.items() if from_fp32 is dtype]
    others = {name: from_lower for name, (_, from_lower) in both.items() if name not in lower}
    groups = {
        "computed in 16 bits, whatever comes in": lower,
        "computed in fp32, whatever comes in": [name for name, of in others.items() if of is torch.float32],
        "as its inputs are, 16 bits or fp32": [name for name, of in others.items() if of is dtype],
        "fp32 as soon as one input is fp32": widest,
    }
    lines = ((f"{title}:", f"    {', '.join(names) or 'none of those tried'}") for title, names in groups.items())
    return Table(tuple(line for both_lines in lines for line in both_lines))


# -- how much it can bring ---------------------------------------------------------------------------------------------


def products(device: torch.device, size: int = 256) -> Table:
    """One square matrix product in each format, in turn with fp32: its time, and its speedup."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    lines = [f"a product of two matrices, {size} x {size}, on the {device.type.upper()}"]
    with waiting("multiplying matrices in each format"):
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            speed = _product_speed(a, b, dtype)
            if len(lines) == 1:
                lines.append(f"  fp32 {duration(1e6 * speed.before_s):>10}")
            lines.append(f"  {name} {duration(1e6 * speed.after_s):>10}   {speed.words}")
    return Table(tuple(lines))


def _product_speed(a: Tensor, b: Tensor, dtype: torch.dtype) -> Speed:
    short_a, short_b = a.to(dtype), b.to(dtype)
    return time_pairs(_repeated(a, b), _repeated(short_a, short_b), budget_s=6.0)


def _repeated(a: Tensor, b: Tensor, least_s: float = 0.01) -> Callable[[], float]:
    """Seconds of one product, timed over as many in a row as take about `least_s`, so that the clock resolves it."""
    once = seconds_of(lambda: torch.mm(a, b))
    once()
    count = min(1000, max(1, math.ceil(least_s / once())))
    many = seconds_of(lambda: [torch.mm(a, b) for _ in range(count)])
    return lambda: many() / count


def at_most(share: float, times: float) -> float:
    """The speedup of a step in which only `share` gets the speedup `times`: Amdahl's law."""
    return 1 / (1 - share + share / times)


@notes
def draw_gains(names: Mapping[str, str], device: torch.device) -> Figure:
    """Experiments of `amp=bf16` by the share of products in their step, under the limit of Amdahl's law on this device.

    `names`: the text of each dot by the experiment's name. The ratio in the law is that of one product, measured here.
    """
    dots = []
    for name, words in names.items():
        with suppress(NotMeasured):
            first = latest_experiment(name).comparisons[0]
            share, times, interval = product_share(first.a.facts), first.times_as_fast, first.times_as_fast_interval
            if share is not None and times is not None and interval is not None:
                dots.append((words, 100 * share, times, interval, first.verdict))
    if not dots:
        raise NotMeasured("None of these comparisons is there yet: run their cells first.")
    with waiting("measuring one matrix product in both formats"):
        a, b = torch.randn(256, 1024, device=device), torch.randn(1024, 1024, device=device)
        ratio = max(1.0, _product_speed(a, b, torch.bfloat16).times)
    shares = np.linspace(0, 1, 101)
    title = f"your steps; line: Amdahl, {factor(ratio)}× speedup of matmuls"
    label = "share of matmuls in the baseline step, %"
    with plot(8, 3.2, title, label, "speedup with bf16", log={"y": 2}) as (figure, axes):
        axes.plot(100 * shares, [at_most(float(x), ratio) for x in shares], color=GREY, lw=1.5)
        axes.axhline(1, color=PALE, lw=1)
        for words, x, y, (low, high), verdict in dots:
            colour = GREY if not is_decided(verdict) else BLUE if y > 1 else ORANGE
            axes.errorbar([x], [y], [[max(0.0, y - low)], [max(0.0, high - y)]], fmt="o", color=colour, capsize=3)
            side, away = ("left", 8) if x < 60 else ("right", -8)
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.annotate(words, (x, y), (away, 6), textcoords="offset points", ha=side, size=8.5, bbox=box)
        axes.set_xlim(-3, 103)
    return figure


# -- gradients that vanish ---------------------------------------------------------------------------------------------


class SmallLoss(Struct, frozen=True):
    """A classifier of digits with four hidden layers and a small loss: `weight` times the cross-entropy."""

    weight: float = LOSS_WEIGHT
    device: torch.device = field(default_factory=default_device)
    digits: DigitsInMemory = field(default_factory=DigitsInMemory)

    def model(self) -> nn.Module:
        """The model, always with the same initial weights."""
        with seeded():
            layers = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(4)]
            return nn.Sequential(*layers, nn.Linear(64, 10)).to(self.device)

    def loss(self, model: nn.Module, rows: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The loss of these rows; `dtype`: the format of autocast, None without autocast."""
        pixels, labels = self.digits.pixels[rows].to(self.device), self.digits.labels[rows].to(self.device)
        with torch.autocast(self.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss: Tensor = self.weight * functional.cross_entropy(model(pixels), labels)
        return loss

    def gradients(self, dtype: torch.dtype | None, scale: float = 1.0) -> Tensor:
        """The gradients of all weights as after backward(): multiplied by `scale`."""
        model = self.model()
        with one_thread():
            torch.autograd.backward(scale * self.loss(model, torch.arange(512), dtype))
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()

    def losses(self, dtype: torch.dtype | None, *, scaled: bool = False, steps: int = 80) -> list[float]:
        """The loss of each step of a training, without the weight."""
        model, rows = self.model(), torch.Generator().manual_seed(1)
        # Adam divides by the size of the gradients, so the weight of the loss has no effect if eps does not dominate
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-12)
        scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        curve = []
        with one_thread():
            for _ in range(steps):
                loss = self.loss(model, torch.randint(len(self.digits), (128,), generator=rows), dtype)
                optimizer.zero_grad()
                torch.autograd.backward(scaler.scale(loss))
                scaler.step(optimizer)
                scaler.update()
                curve.append(loss.item() / self.weight)
        return curve


def draw_gradients(weight: float = LOSS_WEIGHT) -> Figure:
    """How large the gradients of one step are, and which of them fp16 cannot hold."""
    gradients = SmallLoss(weight).gradients(None).abs()
    sizes = gradients[gradients > 0].log2().numpy()
    half = FORMATS[2]
    lost = sizes < half.smallest_log2 - 1  # half of the smallest number rounds to zero
    title = f"gradients of one step, computed in fp32: {percent(float(lost.mean()))} lie below what fp16 can hold"
    with plot(8, 2.6, title, bare=BARE) as (figure, axes):
        axes.hist([sizes[lost], sizes[~lost]], bins=list(range(-48, 20)), stacked=True, color=[ORANGE, BLUE])
        top = 0.98 * axes.get_ylim()[1]
        for at, words, side in ((half.smallest_log2, "smallest", "left"), (half.largest_log2, "largest", "right")):
            axes.axvline(at, color=GREY, lw=1)
            axes.text(at, top, f" fp16's {words} ", va="top", ha=side, size=8, color=GREY)
        axes.set_xticks(range(-40, 21, 10), [f"$2^{{{power}}}$" for power in range(-40, 21, 10)])
        axes.set_yticks([])
    return figure


def lost_gradients(powers: Sequence[int], weight: float = LOSS_WEIGHT) -> Table:
    """The gradients in fp16 with the loss times 2 to these powers, and in bf16 with the unscaled loss."""
    study = SmallLoss(weight)
    exact = study.gradients(None)
    rows = []
    with waiting("computing the gradients in each format"):
        for name, dtype, power in (*(("fp16", torch.float16, p) for p in powers), ("bf16", torch.bfloat16, 0)):
            gradients = study.gradients(dtype, 2.0**power)
            lost = float(((gradients == 0) & (exact != 0)).sum() / (exact != 0).sum())
            overflown = float((~torch.isfinite(gradients)).double().mean())
            rows.append((name, f"2^{power}", percent(lost), percent(overflown)))
    return Table.of(("", "loss times", "lost (0)", "overflown (inf)"), rows)


def draw_losses(weight: float = LOSS_WEIGHT) -> Figure:
    """The same training from the same start in each format, its loss by step."""
    study = SmallLoss(weight)
    dtypes = {"fp32": None, "fp16": torch.float16, "fp16, scaled": torch.float16, "bf16": torch.bfloat16}
    with waiting("training from the same start in each format"):
        curves = {name: study.losses(dtype, scaled="scaled" in name) for name, dtype in dtypes.items()}
    dashes = {"fp16, scaled": (6, 4), "bf16": (2, 3)}
    with plot(8, 2.8, "loss, from the same start with the same batches", "step", legend={}) as (figure, axes):
        for name, curve in curves.items():
            label, style = f"{name} (at the end {curve[-1]:.2f})", (0, dashes.get(name, ()))
            axes.plot(curve, color=_COLOURS[name], lw=2, linestyle=style, label=label)
        axes.grid(color=GRID, lw=0.6)
    return figure


# -- the exercise ------------------------------------------------------------------------------------------------------

CLIPPED_NORM = 1.0
_NEAR = 0.02  # relative: gradients have 16 bits


_BATCHES = (20.0, 20.0, 1e6)  # factors on the inputs: the gradients must be clipped; the last overflows


@exercise()
def check_amp_step(amp_step: Any) -> Checked:
    """Whether `amp_step(model, optimizer, scaler, inputs, labels)` is a correct step in fp16, scaled and clipped."""
    device = default_device()
    mine, expected = RecordingScaler(device), RecordingScaler(device)
    for count, enlarged in enumerate(_BATCHES, start=1):
        expected.run(_right_step, enlarged)
        mine.run(amp_step, enlarged)
        overflows = count == len(_BATCHES)
        faults = _faults_of_overflow(mine) if overflows else _faults(mine, expected.raw_norm)
        problem = next(faults, "")
        if not problem and not torch.allclose(mine.weights, expected.weights, rtol=1e-3, atol=1e-5):
            problem = "The order is right, but the weights moved in another way than clipped gradients move them."
        if problem:
            return wrong(problem if count != 2 else f"The first call is right, the second is not. {problem}")
    return right(
        "The loss is scaled, the gradients are unscaled before they are clipped, a batch that overflows is left out, "
        "and the scale adapts."
    )


def _right_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, inputs: Tensor, labels: Tensor
) -> None:
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        loss = functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    torch.autograd.backward(scaler.scale(loss))
    scaler.unscale_(optimizer)
    scaler.raw_norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_NORM))
    scaler.step(optimizer)
    scaler.update()


def _faults(mine: RecordingScaler, raw_norm: float) -> Iterator[str]:
    """What is wrong with a step, in the order in which it is written."""
    calls, scale, times, norm = mine.calls, mine.scale_before, mine.times_scaled or 0.0, mine.norm
    does_not_run = f"It does not run. {mine.error}"
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {CLIPPED_NORM:g})"
    is_unscaled = "unscale_" in calls
    before_update = calls[: calls.index("update")] if "update" in calls else calls
    before_unscale = calls[: calls.index("unscale_")] if is_unscaled else []
    at_update = 0.0 if norm is None else norm
    if mine.short_weights:
        yield ("The model's weights are no longer fp32. Leave them: autocast casts copies of them.")
    if not mine.forward:
        yield (does_not_run if mine.error else "The model was not called: model(inputs).")
    if mine.autocast is None:
        yield (
            "The forward pass computes in fp32: model and loss belong into "
            "`with torch.autocast(device.type, dtype=torch.float16):`."
        )
    if mine.autocast is not torch.float16:
        yield (
            f"The forward pass computes in {str(mine.autocast).removeprefix('torch.')}. That needs no scaler; use "
            "float16 here, which does: dtype=torch.float16."
        )
    if "update" in calls and "step" not in before_update:
        yield ("scaler.update() comes last: it looks back at whether the gradients of this step overflowed.")
    if "step" in before_unscale:
        yield ("scaler.unscale_(optimizer) comes after the update of the weights, too late for clipping.")
    if mine.times_scaled is None:
        yield (does_not_run if mine.error else "There is no backward pass: call backward() on the scaled loss.")
    if mine.backward_in_autocast:
        yield (
            "backward() ran inside autocast. Close that block after the loss: the backward pass uses the formats of "
            "the forward pass by itself, and PyTorch advises against autocast around it."
        )
    if _is_near(times, 1):
        yield (
            "backward() ran on the plain loss, so small gradients vanish: scaler.scale(loss).backward(). (The scaler "
            "divides by its scale later in any case, and the update would be too small.)"
        )
    if not _is_near(times, scale):
        yield (
            f"backward() ran on the loss times {factor(times)}, and the scaler's scale is {scale:g}: scale it once, "
            "with scaler.scale(loss)."
        )
    if mine.stale:
        yield ("Gradients of an earlier call are still there and are added: optimizer.zero_grad() once per call.")
    if norm == 0:
        yield (
            "No gradients are left at the update: zero_grad() between backward() and the update takes them away. It "
            "comes before backward()."
        )
    if mine.error:
        yield (does_not_run)
    if mine.own_steps > 0:
        yield (
            "optimizer.step() was called directly. scaler.step(optimizer) does it for you, and leaves the step out "
            "where gradients overflowed."
        )
    if norm is None:
        yield ("The weights do not move: scaler.step(optimizer) is missing.")
    if not is_unscaled and at_update > 1.5 * raw_norm:
        yield (f"The gradients are not clipped: first scaler.unscale_(optimizer), then {clip}.")
    if not is_unscaled or at_update < CLIPPED_NORM / 2:
        yield (
            "The gradients were clipped while they were still multiplied by the scale, so next to nothing is left of "
            f"them: scaler.unscale_(optimizer) first, then {clip}."
        )
    if _is_near(at_update, raw_norm):
        yield (f"The gradients are unscaled, but not clipped: {clip}, before scaler.step.")
    if not _is_near(at_update, CLIPPED_NORM):
        yield (f"The gradients' norm is {factor(at_update)} at the update; expected {CLIPPED_NORM:g}: {clip}.")
    if "update" not in calls:
        yield ("scaler.update() is missing at the end: the scale would never adapt.")


def _is_near(value: float, expected: float) -> bool:
    return abs(value / expected - 1) <= _NEAR


def _faults_of_overflow(mine: RecordingScaler) -> Iterator[str]:
    """What is wrong with a step whose gradients are not finite."""
    start = "With a batch whose gradients overflow"
    if mine.error:
        yield (f"{start}, it does not run ({mine.error}). The scaler leaves such a step out by itself.")
    if mine.moved or mine.own_steps > 0:
        yield (f"{start}, the weights moved: leave that decision to scaler.step(optimizer).")
    if mine.get_scale() >= mine.scale_before:
        yield (f"{start}, the scale stays as it was: call scaler.step and scaler.update in any case.")


# -- what the notebook asks --------------------------------------------------------------------------------------------


QUESTIONS: Mapping[str, Question] = {
    "products": share(
        "What share of each step goes to matrix products?",
        lambda: product_share(latest_facts("full-precision")),
        "of each step goes to matrix products",
    ),
    "bf16": times("What speedup does bf16 give? (0.5: 2× slower)", "in-bf16", "with bf16"),
    "moving": times(
        "What speedup does bf16 give to a step of normalizations and activations?",
        "moving",
        "with bf16 where few matrices are multiplied",
    ),
}
