"""Lesson 07, mixed precision: number formats, what autocast casts, gradients that vanish, and a GradScaler step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpulab.lessons.check import Checked, Table, is_unanswered, right, unanswered, wrong
from gpulab.lessons.guesses import Question, times

FORMATS = (torch.float32, torch.float16, torch.bfloat16)
SCALE = 1024.0
CLIP = 0.5
BEGIN = "Write the body of the function in place of the dots, then run that cell and this one again."


def number_formats() -> Table:
    """Bits, range and precision of the formats, from PyTorch itself; TF32 has no dtype: its product reads 10 bits."""
    lines = [f"{'format':10} {'bytes':>5} {'largest':>10} {'smallest':>10} {'next after 1':>13}"]
    for dtype in FORMATS:
        info = torch.finfo(dtype)
        name = str(dtype).removeprefix("torch.")
        smallest = info.smallest_normal
        lines.append(f"{name:10} {info.bits // 8:5} {info.max:10.3g} {smallest:10.2g} {1 + info.eps:13.8g}")
    return Table(
        (*lines, "TF32: the range of float32, the precision of float16, only inside products of NVIDIA's GPUs")
    )


def autocast_casts(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Table:
    """The number format of the result of some operators under autocast, as this PyTorch has it, of 32-bit inputs."""
    a, image = torch.randn(4, 4, device=device), torch.randn(1, 2, 8, 8, device=device)
    weight, labels = torch.randn(2, 2, 3, 3, device=device), torch.tensor([0, 1, 2, 3], device=device)
    narrow = a.to(dtype)
    operators: Sequence[tuple[str, Callable[[], Tensor]]] = (
        ("matmul", lambda: a @ a),
        ("linear", lambda: functional.linear(a, a)),
        ("conv2d", lambda: functional.conv2d(image, weight)),
        ("attention", lambda: functional.scaled_dot_product_attention(a[None], a[None], a[None])),
        ("relu of 32 bits", lambda: functional.relu(a)),
        ("relu of 16 bits", lambda: functional.relu(narrow)),
        ("softmax of 16 bits", lambda: functional.softmax(narrow, -1)),
        ("layer_norm of 16 bits", lambda: functional.layer_norm(narrow, (4,))),
        ("sum of 16 bits", lambda: narrow.sum()),
        ("cross_entropy of 16 bits", lambda: functional.cross_entropy(narrow, labels)),
        ("16 bits + 32 bits", lambda: narrow + a),
    )
    lines = [f"{'operator':26} result"]
    with torch.autocast(device, dtype):
        lines += [f"{name:26} {str(work().dtype).removeprefix('torch.')}" for name, work in operators]
    return Table(tuple(lines))


def vanishing_gradients(loss_scales: Sequence[float] = (1.0, 1024.0, 2.0**24)) -> Table:
    """A gradient of 1e-8 in float16, with the loss multiplied before it is computed and the gradient divided after it.

    Float16's smallest number is about 6e-8: what is smaller becomes 0, what is larger than 65,504 becomes infinite.
    """
    lines = [f"{'loss multiplied by':>19} {'gradient in float16':>20} {'divided again':>14}   true: 1e-08"]
    for scale in loss_scales:
        gradient = torch.tensor(1e-8 * scale, dtype=torch.float16)
        lines.append(f"{scale:19g} {gradient.item():20.4g} {gradient.float().item() / scale:14.3g}")
    largest = torch.tensor(1e-2 * 2.0**24, dtype=torch.float16).item()
    return Table((*lines, f"and a gradient of 0.01, multiplied by {2.0**24:g}, is {largest} in float16"))


class WideNetwork(nn.Module):
    """Products of matrices and little else: what mixed precision is made for."""

    def __init__(self, width: int = 512, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, classes))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.layers(pixels)
        return logits


# -- the exercise ------------------------------------------------------------------------------------------------------


@dataclass
class _Journal:
    """What a step did, in order."""

    calls: list[str] = field(default_factory=list)
    under_autocast: dict[str, bool] = field(default_factory=dict)

    def add(self, name: str) -> None:
        self.calls.append(name)
        self.under_autocast.setdefault(name, torch.is_autocast_enabled("cpu"))


class _Scaler:
    """A GradScaler's calls on the CPU, written down; it scales as the real one does and finds no infinity."""

    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self._unscaled = False

    def scale(self, loss: Tensor) -> Tensor:
        self._journal.add("scale")
        return loss * SCALE

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self._journal.add("unscale_")
        if self._unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self._unscaled = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= SCALE

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._journal.add("step")
        if not self._unscaled:
            self.unscale_(optimizer)
            self._journal.calls.pop()
        optimizer.step()

    def update(self) -> None:
        self._journal.add("update")
        self._unscaled = False

    def get_scale(self) -> float:
        return SCALE


def check_step(amp_step: Any) -> Checked:
    """Whether `amp_step(model, optimizer, scaler, inputs, labels)` is a right step with a scaler and clipping."""
    if is_unanswered(amp_step):
        return unanswered(BEGIN)
    journal, moved = _tried(amp_step)
    if not journal.calls:
        return unanswered(BEGIN)
    hint = _mistake(journal) or _mistake_in_numbers(moved)
    if hint:
        return wrong(hint)
    return right("Forward in autocast, backward of the scaled loss, gradients unscaled before they are clipped.")


def _tried(amp_step: Any) -> tuple[_Journal, tuple[Tensor, Tensor]]:
    """Two steps on a small model; what was called, and how far the weights were moved by it and by a right step."""
    journal = _Journal()
    model, inputs, labels = _small_training()
    model.register_forward_pre_hook(lambda *_: journal.add("forward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: journal.add("optimizer.step"))
    original = torch.nn.utils.clip_grad_norm_
    scaler = _Scaler(journal)

    def clip(*arguments: Any, **options: Any) -> Tensor:
        journal.add("clip")
        return original(*arguments, **options)

    backward = torch.Tensor.backward

    def noted(loss: Tensor, *arguments: Any, **options: Any) -> None:
        journal.add("backward")
        backward(loss, *arguments, **options)  # type: ignore[no-untyped-call]

    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    torch.nn.utils.clip_grad_norm_, torch.Tensor.backward = clip, noted  # type: ignore[assignment, method-assign]
    try:
        for _ in range(2):
            amp_step(model, optimizer, scaler, inputs, labels)
    finally:
        torch.nn.utils.clip_grad_norm_, torch.Tensor.backward = original, backward  # type: ignore[method-assign]
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    return journal, (moved, _rightly_moved())


def _mistake(journal: _Journal) -> str:
    """What is wrong with the order of the calls; empty where nothing is."""
    calls = journal.calls
    if "scale" not in calls or "backward" not in calls:
        return "The loss must be scaled before backward: scaler.scale(loss).backward()."
    if "step" not in calls:
        extra = " optimizer.step() alone does not know of the scale." if "optimizer.step" in calls else ""
        return f"The scaler makes the step: scaler.step(optimizer).{extra}"
    if "update" not in calls:
        return "scaler.update() is missing at the end: without it the scale never adapts, and the next step fails."
    if not journal.under_autocast.get("forward"):
        return 'The model runs in 32 bits: put the forward pass into torch.autocast("cpu", torch.bfloat16).'
    if journal.under_autocast.get("backward"):
        return "backward() stands inside autocast. Only the forward pass and the loss belong there."
    if "clip" not in calls:
        return f"The gradients are not clipped: torch.nn.utils.clip_grad_norm_(model.parameters(), {CLIP})."
    if "unscale_" not in calls or calls.index("unscale_") > calls.index("clip"):
        return (
            f"The gradients are still {SCALE:g} times too large when they are clipped, so clipping takes nearly all of "
            "them away. Call scaler.unscale_(optimizer) before clipping."
        )
    if calls.index("clip") > calls.index("step"):
        return "Clipping comes after the step, when it has no effect any more."
    return ""


def _mistake_in_numbers(moved: tuple[Tensor, Tensor]) -> str:
    mine, wanted = moved
    if torch.allclose(mine, wanted, rtol=0.05, atol=1e-4):
        return ""
    if not mine.any():
        return "The weights did not move: are the gradients set to zero between backward and step?"
    return (
        "The calls are right and the weights move differently than with a right step. Is optimizer.zero_grad() called "
        "once per step, before backward? And is the loss cross_entropy(model(inputs), labels)?"
    )


def _rightly_moved() -> Tensor:
    model, inputs, labels = _small_training()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def _small_training() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        return model, 4 * torch.randn(8, 6), torch.randint(3, (8,))


def amdahl(product_share: float, product_times: float, rest_times: float = 1.0) -> float:
    """How many times as fast a step gets if its products do by `product_times`, and the rest by `rest_times`.

    definitions.md, "Mixed precision".
    """
    return 1 / (product_share / product_times + (1 - product_share) / rest_times)


def amdahl_table(times_as_fast: float = 8.0) -> Table:
    """What a step gains for some shares of products in it, where a product becomes that much faster."""
    lines = [f"{'share of products':>18} {'the step is':>16}"]
    lines += [f"{share:18.0%} {amdahl(share, times_as_fast):6.2f} times as fast" for share in (0.1, 0.3, 0.5, 0.7, 0.9)]
    return Table(tuple(lines))


QUESTIONS: Mapping[str, Question] = {
    "bf16": times("How many times as fast is the step in bfloat16 on this device?", "bf16", "with amp=bf16"),
}
EXERCISES: Mapping[str, Callable[..., Checked]] = {"amp-step": check_step}
