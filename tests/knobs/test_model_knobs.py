"""Layout, attention and compilation of models that know nothing of them; and all model knobs together, in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gpulab.knobs.accumulation import ACCUMULATE
from gpulab.knobs.backend_settings import ATTENTION, TF32
from gpulab.knobs.catalogue import KNOBS
from gpulab.knobs.compile import COMPILE
from gpulab.knobs.fused_optimizer import FUSED_OPTIMIZER
from gpulab.knobs.knob import Knob, KnobEffects, Value
from gpulab.knobs.memory_format import CHANNELS_LAST
from gpulab.knobs.mixed_precision import AMP
from gpulab.knobs.observation import Observation
from gpulab.run import Run, StepFlag
from tests.knobs.scenes import SCENE, calling
from tests.knobs.test_optimizer_knobs import looks
from tests.knobs.test_precision_knobs import settings as precision_settings
from tests.support.knob_cells import Cell, Net, new_cell, observation_of, same, traced
from tests.support.leftovers import leftovers

LAST = torch.channels_last


@pytest.fixture
def light_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without code generation: what the knob does is the same, and quick."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    COMPILE.forget()
    torch.compiler.reset()


# -- channels_last -----------------------------------------------------------------------------------------------------


def layouts(cell: Cell) -> list[object]:
    """Where each weight lies, and how its optimizer states do."""
    state = cell.optimizer.state
    return [
        (p.data_ptr(), p.stride(), [v.stride() for v in state.get(p, {}).values() if isinstance(v, torch.Tensor)])
        for p in cell.model.parameters()
    ]


@pytest.mark.parametrize("fused", [False, True])
def test_channels_last_changes_layouts_and_restores_them(fused: bool) -> None:
    cell, plain = new_cell(fused=fused), new_cell(fused=fused)
    cell.run()
    plain.run()
    before, seen = layouts(cell), []

    class Watching(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            seen.append((x.is_contiguous(memory_format=LAST), self.weight.is_contiguous(memory_format=LAST)))
            return super().forward(x)

    assert isinstance(cell.model, Net)
    cell.model.convolve.__class__ = Watching
    weight = cell.model.convolve.weight
    with CHANNELS_LAST.applied(True) as log:
        cell.run()
        assert cell.optimizer.state[weight]["exp_avg"].is_contiguous(memory_format=LAST)
        assert weight.grad is not None and weight.grad.is_contiguous(memory_format=LAST)
    plain.run()
    assert seen == [(True, True)] * 6 and log.counts == {"weights": 1, "inputs": 6}
    assert layouts(cell) == before and cell.model.convolve.weight is weight
    assert same(cell.weights, plain.weights)
    cell.run()
    plain.run()
    assert same(cell.weights, plain.weights) and len(seen) == 12 and seen[-1] == (False, False)


def test_a_model_that_is_channels_last_can_be_made_contiguous() -> None:
    cell = new_cell()
    assert isinstance(cell.model, Net)
    cell.model.to(memory_format=LAST)  # type: ignore[call-overload]
    before = layouts(cell)
    with CHANNELS_LAST.applied(False) as log:
        cell.run()
        assert cell.model.convolve.weight.is_contiguous()
    assert log.counts == {"weights": 1} and [b[:2] for b in layouts(cell)] == [b[:2] for b in before]  # type: ignore[index]
    with CHANNELS_LAST.applied(True) as log:
        cell.run()
    assert "weights" not in log.counts


def test_layout_of_shared_weights_and_other_modules_stays() -> None:
    layer = nn.Conv2d(3, 8, 3)
    model = nn.Sequential(layer)
    whole = torch.zeros(8 * 3 * 3 * 3 + 5)
    layer.weight.data = whole[5:].view(8, 3, 3, 3)
    with CHANNELS_LAST.applied(True) as log:
        model(torch.ones(1, 3, 4, 4))
        nn.LayerNorm(4)(torch.ones(1, 3, 4, 4))
    assert log.counts == {"inputs": 1} and "larger tensor" in log.refusals[0]
    assert layer.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_model_that_the_cell_moves_stays_where_it_was_moved() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    with CHANNELS_LAST.applied(True):
        model(torch.ones(1, 3, 4, 4))
        model.double()
    assert model[0].weight.dtype == torch.float64


def test_channels_last_says_what_it_did(plain_run: Run) -> None:
    as_written = CHANNELS_LAST.verify(SCENE, False, KnobEffects(), plain_run)
    assert as_written.evidence.endswith("already channels first")
    nothing_to_do = CHANNELS_LAST.verify(SCENE, True, KnobEffects(), plain_run)
    assert "are the same layout" in nothing_to_do.evidence


# -- attention ---------------------------------------------------------------------------------------------------------


def sdp_flags() -> list[bool]:
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return [getattr(torch._C, f"_get_{kind}_sdp_enabled")() for kind in kinds]


@pytest.mark.parametrize(("value", "flags"), [("math", [0, 0, 1, 0]), ("flash", [1, 0, 1, 0]), ("auto", [1, 1, 1, 1])])
def test_attention_runs_on_the_back_end_and_the_flags_come_back(
    seen: Observation, value: str, flags: list[int]
) -> None:
    before = sdp_flags()
    assert seen.attention == "flash" and all(before)
    inside: list[list[bool]] = []
    cell = new_cell()
    cell.after_backward = lambda: inside.append(sdp_flags())
    run, (log,) = traced(cell, (ATTENTION, value))
    said = ATTENTION.verify(seen, value, log, run)
    assert inside[0] == [bool(flag) for flag in flags] and sdp_flags() == before
    assert said.state == ("took effect" if value == "math" else "no effect")
    assert ("attention_math" if value == "math" else "flash") in said.evidence


def test_attention_falls_back_and_says_so() -> None:
    class Masked(Net):
        def forward(self, x: Any) -> Any:
            q = torch.relu(self.convolve(x)).flatten(2).transpose(1, 2).unsqueeze(1)
            mask = q.mean(-1, keepdim=True).expand(-1, -1, -1, 36)  # one that needs a gradient is not for flash
            return self.head(self.project(F.scaled_dot_product_attention(q, q, q, mask)).mean((1, 2)))

    def cell() -> Cell:
        model = Masked()
        return Cell(model, torch.optim.SGD(model.parameters(), lr=0.1))

    run, (log,) = traced(cell(), (ATTENTION, "flash"))
    said = ATTENTION.verify(observation_of(cell()), "flash", log, run)
    assert said.state == "no effect" and "flash attention does not support these inputs" in said.evidence


# -- compile -----------------------------------------------------------------------------------------------------------


def test_compile_compiles_once_and_is_undone(light_compiler: None, seen: Observation, plain_run: Run) -> None:
    """That torch's own compiler takes a model is tested with experiments."""
    plain = new_cell()
    plain.run()
    first = new_cell()
    run, (log,) = traced(first, (COMPILE, "default"))
    again, _ = traced(new_cell(), (COMPILE, "default"))
    COMPILE.forget()
    said = COMPILE.verify(seen, "default", log, run)
    assert said.state == "took effect" and "Torch-Compiled Region" in said.evidence
    assert same(first.weights, plain.weights)
    assert "_compiled_call_impl" not in vars(first.model)
    assert run.steps.flags[0] & StepFlag.COMPILE and not (again.steps.flags & StepFlag.COMPILE).any()
    assert not torch._dynamo.eval_frame.cached_backends
    assert COMPILE.verify(seen, "default", log, plain_run).state == "no effect"


TORCHS_CLASS = pytest.param(
    lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
    id="torch's class",
    marks=pytest.mark.skipif(torch.__version__ < "2.7", reason="PyTorch 2.6 compiles each of its wrappers anew"),
)


@pytest.mark.parametrize("make", [pytest.param(Net, id="the user's class"), TORCHS_CLASS])
def test_blocks_after_the_first_compile_nothing_anew(light_compiler: None, make: Callable[[], nn.Module]) -> None:
    stats = torch._dynamo.utils.counters["stats"]
    graphs = [stats["unique_graphs"]]
    model = make()
    for _ in range(3):
        with COMPILE.applied("default") as log:
            out = model(torch.ones(1, 3, 6, 6))
            nn.MSELoss()(out, torch.zeros_like(out)).backward()
            assert log.counts == {"modules compiled": 1} and not log.refusals
        model(torch.ones(1, 3, 6, 6))
        graphs.append(stats["unique_graphs"])
    assert graphs[1] > graphs[0] and graphs[1] == graphs[2] == graphs[3]


def test_dynamo_takes_no_name_out_that_is_out_already(light_compiler: None) -> None:
    """It does so when compiled code goes, and Python would print a KeyError into the user's output for each."""
    from torch._dynamo.utils import CleanupManager

    with COMPILE.applied("default"):
        Net()(torch.ones(1, 3, 6, 6)).sum().backward()
    alive = [ref() for ref in CleanupManager.instance.refs.values()]  # as a cycle of references would keep them
    assert alive
    COMPILE.forget()
    left = [hook for hooks in CleanupManager.instance.values.values() for hook in hooks]
    assert all(hook.name in hook.scope for hook in left)


def test_what_the_user_compiled_is_left_and_stays_compiled(light_compiler: None) -> None:
    mine, theirs = torch.compile(Net()), Net()
    theirs.compile()
    compiled = vars(theirs)["_compiled_call_impl"]
    x = torch.ones(1, 3, 6, 6)
    mine(x), theirs(x)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with COMPILE.applied("default") as log:
        mine(x), theirs(x)
    COMPILE.forget()
    mine(x), theirs(x)
    assert not log.counts and vars(theirs)["_compiled_call_impl"] is compiled
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_what_cannot_be_compiled_runs_as_it_is_and_is_said(monkeypatch: pytest.MonkeyPatch, plain_run: Run) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such instruction")

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    cell, plain = new_cell(), new_cell()
    with COMPILE.applied("default") as log:
        cell.run()
    plain.run()
    COMPILE.forget()
    assert same(cell.weights, plain.weights, exactly=True) and "no such instruction" in log.refusals[0]
    assert COMPILE.verify(SCENE, "default", log, plain_run).state == "no effect"
    assert "_compiled_call_impl" not in vars(cell.model)


# -- all together ------------------------------------------------------------------------------------------------------

SETTINGS: tuple[tuple[Knob, Value], ...] = (
    (AMP, "bf16"),
    (AMP, "fp16"),
    (TF32, True),
    (ATTENTION, "math"),
    (FUSED_OPTIMIZER, True),
    (CHANNELS_LAST, True),
    (ACCUMULATE, 2),
    (COMPILE, "default"),
)
LIGHT = SETTINGS[:-1]
EVIDENCE = {
    "attention": "attention",
    "fused_optimizer": "_fused_adamw_",
    "channels_last": "1 weights and 6 inputs",
    "accumulate": "3 of 6",
    "compile": "Torch-Compiled Region",
}


def everything(cell: Cell) -> list[object]:
    """All that the knobs could leave behind, in torch and on the user's objects."""
    on_modules = [sorted(vars(m)) for m in cell.model.modules()]
    autocast = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()]
    objects = [id(p) for p in cell.model.parameters()]
    return [
        leftovers(sweep=False), torch.compile, on_modules, autocast, objects, sdp_flags(), precision_settings(),
        layouts(cell), looks(cell.optimizer),
    ]  # fmt: skip


class Interrupt(BaseException):
    """Not an Exception, as KeyboardInterrupt."""


def interrupt(cell: Cell, where: str) -> None:
    """Have the third call there end the run."""
    assert isinstance(cell.model, Net)
    calls = iter(range(100))

    def count(*args: Any) -> None:
        if next(calls) == 2:
            raise Interrupt

    if where == "in the model":
        cell.model.head.register_forward_hook(count)
    elif where == "in the backward pass":
        cell.model.head.weight.register_hook(count)  # type: ignore[no-untyped-call]
    elif where == "after it":
        cell.after_backward = count
    else:
        cell.optimizer.register_step_pre_hook(count)


PLACES = ("in the model", "in the backward pass", "after it", "in the step")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(LIGHT).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n])),
       where=st.sampled_from([None, *PLACES]), trained_before=st.booleans())  # fmt: skip
def test_in_any_order_everything_is_restored(
    order: list[tuple[Knob, Value]], where: str | None, trained_before: bool
) -> None:
    _leave_nothing(order, where, trained_before)


@pytest.mark.parametrize(("where", "reverse"), [*zip([None, None, *PLACES], itertools.cycle([False, True]))])
def test_with_compilation_too(light_compiler: None, where: str | None, reverse: bool) -> None:
    _leave_nothing(list(reversed(SETTINGS) if reverse else SETTINGS), where, trained_before=True)


def _leave_nothing(order: list[tuple[Knob, Value]], where: str | None, trained_before: bool) -> None:
    cell, plain = new_cell(), new_cell()
    plain.run()
    cell.run(steps=6 if trained_before else 0)
    if where is not None:
        interrupt(cell, where)
    before, weights = everything(cell), cell.weights
    reached = False
    try:
        with ExitStack() as undo:
            for knob, value in order:
                undo.enter_context(knob.applied(value))
            cell.run()
            reached = True
    except Interrupt:
        pass
    finally:
        AMP.forget()
    assert reached is (where is None)
    if not trained_before:  # states are the user's training
        for p in cell.model.parameters():
            cell.optimizer.state.pop(p, None)
    assert everything(cell) == before
    assert all(p.grad is None or p.grad.stride() == p.stride() for p in cell.model.parameters())
    assert len({*order}) == 0 or not same(cell.weights, weights)
    assert all(w.isfinite().all() for w in cell.weights)


@pytest.mark.parametrize(
    "order", [SETTINGS[1:], SETTINGS[:0:-1], (*SETTINGS[:1], *SETTINGS[2:])], ids=["fp16", "fp16 back", "bf16"]
)
def test_together_they_all_take_effect_and_train(
    light_compiler: None, seen: Observation, order: tuple[tuple[Knob, Value], ...]
) -> None:
    cell = new_cell()
    run, logs = traced(cell, *order)
    AMP.forget()
    for (knob, value), log in zip(order, logs, strict=True):
        if knob is not TF32:
            said = knob.verify(seen, value, log, run)
            assert said.state == "took effect" and EVIDENCE.get(knob.name, "") in said.evidence, (knob.name, said)
    accumulated, larger = new_cell(), new_cell()
    with ACCUMULATE.applied(2):
        accumulated.run()
    assert all((a - b).abs().max() < 0.05 for a, b in zip(cell.weights, accumulated.weights, strict=True))
    assert not same(cell.weights, larger.weights)


def test_off_runs_as_written_what_the_cell_compiles() -> None:
    ran: list[object] = []

    def backend(graph: Any, inputs: object) -> Any:
        def call(*arguments: object) -> object:
            ran.append(graph)
            return graph(*arguments)

        return call

    torch.compiler.reset()
    model = torch.compile(Net(), backend=backend)
    x = torch.randn(2, 3, 8, 8)
    compiled = model(x)
    assert ran
    ran.clear()
    with COMPILE.applied("off"):
        eager = model(x)
    assert not ran and torch.allclose(compiled, eager, atol=1e-6)
    model(x)
    assert ran, "afterwards it is compiled again"
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_the_code_switches_on_stays_off(plain_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # a compiler switches it off
    anomaly, validation = KNOBS["anomaly"], KNOBS["validate_args"]
    with torch.autograd.set_detect_anomaly(True):
        with suppress(KeyError), anomaly.applied(False) as effects:
            assert not torch.is_anomaly_enabled()
            with torch.autograd.detect_anomaly():
                assert not torch.is_anomaly_enabled()
            raise KeyError
        assert anomaly.verify(SCENE, False, effects, plain_run).state == "took effect"
        assert torch.is_anomaly_enabled()
    with validation.applied(False) as effects:
        torch.distributions.Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(0.0, -1.0)
    assert validation.verify(SCENE, False, effects, plain_run).state == "took effect"
    with validation.applied(False) as effects:
        torch.distributions.Distribution.set_default_validate_args(True)
    assert validation.verify(SCENE, False, effects, plain_run).state == "no effect"


def test_compute_threads_are_set_for_the_run_and_put_back(plain_run: Run) -> None:
    knob, before = KNOBS["compute_threads"], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with suppress(KeyError), knob.applied(1) as log:
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2 and knob.verify(SCENE, 1, log, plain_run).state == "took effect"
        with knob.applied(1) as log:
            torch.set_num_threads(3)  # the code's own
        found = knob.verify(SCENE, 1, log, plain_run)
        assert found.state == "no effect" and "had 3 at the end" in found.evidence
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_trace_shows_whether_it_was_off(monkeypatch: pytest.MonkeyPatch, plain_run: Run) -> None:
    compiled = calling(compiled=True)

    def verified(scene: Observation, *names: str) -> str:
        monkeypatch.setattr("gpulab.knobs.compile.trace_counts", lambda run: dict.fromkeys(names, 1))
        return COMPILE.verify(scene, "off", log, plain_run).state

    with COMPILE.applied("off") as log:
        assert COMPILE.without(compiled) is compiled
    assert verified(SCENE, "aten::mm") == "no effect"
    assert verified(compiled, "aten::mm") == "took effect"
    assert verified(compiled, "Torch-Compiled Region: 0/0") == "no effect"
