"""Knobs of models and optimizers on a real NVIDIA GPU, known by the kernels that ran and taken back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from gpulab.capture.recorder import Capture  # noqa: E402
from gpulab.knobs.accumulation import ACCUMULATE  # noqa: E402
from gpulab.knobs.backend_settings import ATTENTION, TF32  # noqa: E402
from gpulab.knobs.compile import COMPILE  # noqa: E402
from gpulab.knobs.fused_optimizer import FUSED_OPTIMIZER  # noqa: E402
from gpulab.knobs.knob import Knob, KnobEffects, Value, Verification  # noqa: E402
from gpulab.knobs.memory_format import CHANNELS_LAST  # noqa: E402
from gpulab.knobs.mixed_precision import AMP  # noqa: E402
from gpulab.knobs.observation import Observation  # noqa: E402
from gpulab.knobs.observer import observe  # noqa: E402
from gpulab.run import Run, Settings  # noqa: E402
from tests.support.gpu_checks import Cell, apart_fraction, convolutions, product_error, products, switched_and_plain  # noqa: E402

pytestmark = pytest.mark.gpu


def captured(cell: Cell, *settings: tuple[Knob, Value]) -> tuple[Run, Observation, list[KnobEffects]]:
    capture = Capture(Settings(live=False, save=False, warmup=3, device="cuda"), "block", "loss.backward()")
    capture.start()
    try:
        with observe() as seen, ExitStack() as undo:
            logs = [undo.enter_context(knob.applied(value)) for knob, value in settings]
            cell.run(16)  # on a GPU the profiled window comes after eleven steps
    finally:
        run, _ = capture.finish("completed")
        capture.close()
    return run, seen.observation(run), logs


def verified(knob: Knob, value: Value, make: Callable[[], Cell] = Cell) -> Verification:
    _, observation, _ = captured(make())
    assert knob.refuses(observation, value) is None
    run, _, (log,) = captured(make(), (knob, value))
    return knob.verify(observation, value, log, run)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        (AMP, "bf16"),
        (AMP, "fp16"),
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
    _, observation, _ = captured(Cell(), (AMP, "bf16"))
    run, _, (_, log) = captured(Cell(), (AMP, "bf16"), (ATTENTION, value))
    said = ATTENTION.verify(observation, value, log, run)
    assert said.state == "took effect" or observation.attention == value, said


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_count_returns_to_where_the_optimizer_reads_it(fused: bool) -> None:
    cell, plain = switched_and_plain(fused=fused)
    for p, q in zip(cell.model.parameters(), plain.model.parameters(), strict=True):
        a, b = cell.optimizer.state[p]["step"], plain.optimizer.state[q]["step"]
        assert a.device == b.device and a == b == 4
    assert apart_fraction((cell, plain)) < 0.01
    cell.run(1)


def has_tf32() -> bool:
    return bool(torch.cuda.get_device_capability() >= (8, 0))


@pytest.mark.skipif(not has_tf32(), reason="TF32 needs Ampere or newer")
def test_tf32_takes_effect_where_matrix_products_use_it() -> None:
    exact = product_error()
    with TF32.applied(True):
        rounded = product_error()
    assert exact < 1e-5 < rounded, "the switch itself"
    assert product_error() < 1e-5, "and it is taken back"
    said = verified(TF32, True, lambda: Cell(network=products))
    assert said.state == "took effect", said


@pytest.mark.skipif(not has_tf32(), reason="TF32 needs Ampere or newer")
def test_convolutions_that_use_tf32_as_written_are_no_evidence() -> None:
    said = verified(TF32, True, lambda: Cell(network=convolutions))
    assert said.state != "took effect", said
