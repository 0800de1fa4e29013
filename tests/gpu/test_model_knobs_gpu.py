"""Knobs of models and optimizers on a real NVIDIA GPU, known by the kernels that ran and taken back."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from gpulab.capture.recorder import Capture  # noqa: E402
from gpulab.knobs.accumulation import ACCUMULATE  # noqa: E402
from gpulab.knobs.attention import ATTENTION  # noqa: E402
from gpulab.knobs.compiling import COMPILE  # noqa: E402
from gpulab.knobs.fused_optimizer import FUSED_OPTIMIZER  # noqa: E402
from gpulab.knobs.knob import Knob, Log, Value, Verification  # noqa: E402
from gpulab.knobs.memory_format import CHANNELS_LAST  # noqa: E402
from gpulab.knobs.observing import observe  # noqa: E402
from gpulab.knobs.precision import AMP, TF32  # noqa: E402
from gpulab.knobs.scene import Scene  # noqa: E402
from gpulab.run import Run, Settings  # noqa: E402

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(64, 256, 3, padding=1)
        self.project = nn.Linear(256, 512)
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.convolve(x)).flatten(2).transpose(1, 2)
        q = self.project(x).unflatten(2, (8, 64)).transpose(1, 2)
        return self.head(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2).mean(1))


class Cell:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def run(self, steps: int = 8) -> None:
        x, y = torch.randn(16, 64, 16, 16, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda")
        for _ in range(steps):
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


def captured(cell: Cell, *settings: tuple[Knob, Value]) -> tuple[Run, Scene, list[Log]]:
    capture = Capture(Settings(live=False, save=False, warmup=3, device="cuda"), "block", "loss.backward()")
    capture.start()
    try:
        with observe() as seen, ExitStack() as undo:
            logs = [undo.enter_context(knob.applied(value)) for knob, value in settings]
            cell.run()
    finally:
        run, _ = capture.finish("completed")
    return run, seen.scene(run), logs


def verified(knob: Knob, value: Value, written: Cell | None = None) -> Verification:
    _, scene, _ = captured(written or Cell())
    assert knob.refuses(scene, value) is None
    run, _, (log,) = captured(Cell(), (knob, value))
    return knob.verify(scene, value, log, run)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        (AMP, "bf16"),
        (AMP, "fp16"),
        (TF32, True),
        (ATTENTION, "math"),
        (FUSED_OPTIMIZER, True),
        (COMPILE, "default"),
        (COMPILE, "reduce-overhead"),
        (CHANNELS_LAST, True),
        (ACCUMULATE, 2),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_a_knob_takes_effect_on_the_device(knob: Knob, value: Value) -> None:
    try:
        said = verified(knob, value)
    finally:
        knob.forget()
    print(f"\n{knob.name}={value}: {said.state}: {said.evidence}")
    assert said.state == "took effect", said


@pytest.mark.parametrize("value", ["efficient", "flash"])
def test_attention_in_half_precision(value: str) -> None:
    _, scene, _ = captured(Cell(), (AMP, "bf16"))
    run, _, (_, log) = captured(Cell(), (AMP, "bf16"), (ATTENTION, value))
    said = ATTENTION.verify(scene, value, log, run)
    assert said.state == "took effect" or scene.attention == value, said


@pytest.mark.parametrize("fused", [True, False])
def test_the_count_of_steps_comes_back_to_where_the_optimizer_reads_it(fused: bool) -> None:
    cell, plain = Cell(), Cell()
    for c in (cell, plain):
        c.optimizer = torch.optim.AdamW(c.model.parameters(), fused=fused)
        c.run(2)
    with FUSED_OPTIMIZER.applied(not fused) as log:
        cell.run(2)
    plain.run(2)
    assert log.counts == {"optimizers": 1}
    for p, q in zip(cell.model.parameters(), plain.model.parameters(), strict=True):
        a, b = cell.optimizer.state[p]["step"], plain.optimizer.state[q]["step"]
        assert a.device == b.device and a == b == 4
        assert torch.allclose(p, q, atol=1e-4)
    cell.run(1)
