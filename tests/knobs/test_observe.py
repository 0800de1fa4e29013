"""What a run is seen to use: the facts from which knobs tell their values, and nothing left behind."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from gpulab.knobs import observer
from gpulab.knobs.observation import Observation
from gpulab.knobs.observer import Observer, attention_backend, observe, tf32_setting
from gpulab.run import Device, Run
from tests.support import cells_libraries
from tests.support import cells_plain as cells
from tests.support.knob_cells import captured
from tests.support.leftovers import leftovers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def seen_in(cell: Callable[[], object], *, trace: bool = False) -> tuple[Run, Observer]:
    """A full capture of a cell that is observed."""
    run, _, seen = captured(cell, observed=True, trace=trace)
    assert seen is not None
    return run, seen


def observation(cell: Callable[[], object], *, trace: bool = False) -> Observation:
    run, seen = seen_in(cell, trace=trace)
    return seen.observation(run)


# -- loops of all kinds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "loaders", "optimizers", "trained"),
    [
        (cells.one_epoch, 1, ["AdamW"], ["Sequential"]),
        (cells.evaluated, 2, ["SGD"], ["Sequential"]),
        (cells.sliced, 0, ["AdamW"], ["Sequential"]),
        (cells.inference, 1, [], []),
        (cells.by_hand, 1, [], []),
        (cells_libraries.accelerated, 1, ["AdamW"], ["Sequential"]),
        (cells_libraries.lightning_trainer, 2, ["AdamW"], ["Sequential"]),
        (cells_libraries.hugging_face_trainer, 3, ["AdamW"], ["GPT2LMHeadModel"]),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_unmodified_cells(
    cell: Callable[..., None], loaders: int, optimizers: list[str], trained: list[str], tmp_path: Path
) -> None:
    gpt, folder = "GPT2LMHeadModel" in trained, [tmp_path] * ("folder" in inspect.signature(cell).parameters)
    run, seen = seen_in(functools.partial(cell, [], *folder), trace=gpt)
    found = seen.observation(run)
    assert len(found.loaders) == loaders and not found.grad_scaler
    assert [o.class_name for o in found.optimizers] == optimizers
    assert [m.class_name for m in found.modules if m.trained] == trained
    if found.loaders and run.loader is not None:
        assert found.loaders[0].record == run.loader, "the loader that feeds the steps comes first"
    if gpt:
        assert found.loader is not None and found.loader.record.batch_size == 4 and found.loader.record.own_collate
        assert found.attention is not None and "aten::addmm" in found.operators


# -- loaders -----------------------------------------------------------------------------------------------------------


def test_what_limits_a_loader() -> None:
    class Own(BatchSampler):
        pass

    class Mine(DataLoader[Any]):
        pass

    plain = DataLoader(cells.data(24), batch_size=4)
    own = Mine(
        cells.data(24), batch_sampler=Own(RandomSampler(cells.data(24)), 4, True), collate_fn=lambda items: items
    )
    single = DataLoader(cells.data(24), batch_size=None)
    found = observation(lambda: [next(iter(loader)) for loader in (plain, own, single)]).loaders
    assert {(o.custom_batch_sampler, o.record.own_collate, o.record.batch_size) for o in found} == {
        (False, False, 4),
        (True, True, 4),
        (False, True, None),  # torch's own for single items
    }


def test_what_was_defined_in_a_notebook_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import ModuleType

    class Here(TensorDataset):
        pass

    Here.__module__ = "__main__"
    loaders = [DataLoader(torch.utils.data.Subset(Here(torch.ones(4)), [0, 1])), DataLoader(cells.data(24))]
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    found = observation(lambda: [list(loader) for loader in loaders]).loaders
    assert sorted(observed_loader.dataset_from_main for observed_loader in found) == [False, True]
    main.__file__ = "script.py"
    in_script = observation(lambda: [list(loader) for loader in loaders]).loaders
    assert [observed_loader.dataset_from_main for observed_loader in in_script] == [False, False]
    assert found[0].start_method in ("fork", "spawn", "forkserver")


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_optimizers_and_their_forms() -> None:
    net = nn.Linear(8, 3).to(torch.float64)
    optimizers = [
        torch.optim.AdamW(net.parameters(), fused=True),
        torch.optim.SGD(net.parameters(), foreach=False),
        torch.optim.Adadelta(net.parameters()),
        torch.optim.LBFGS(net.parameters()),
    ]

    def closure() -> torch.Tensor:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        return torch.zeros(())

    found = observation(
        lambda: [o.step(closure) for o in optimizers for _ in range(2)]  # type: ignore[arg-type]
    ).optimizers
    assert [(o.class_name, o.supports_fused, o.fused, o.takes_closure) for o in found] == [
        ("AdamW", True, True, False),
        ("SGD", True, None, False),
        ("Adadelta", False, None, False),
        ("LBFGS", False, None, True),
    ]
    assert {(o.parameter_devices, o.parameter_dtypes) for o in found} == {(("cpu",), ("float64",))}


# -- modules -----------------------------------------------------------------------------------------------------------


def test_a_module_trains_only_with_backward_in_training_mode() -> None:
    student, teacher, critic, loss = (
        nn.Linear(8, 3),
        nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 3)).eval(),
        nn.Sequential(nn.Linear(3, 1)),
        nn.MSELoss(),
    )

    def cell() -> None:
        for x, _ in DataLoader(cells.data(24), batch_size=4):
            with torch.no_grad():
                critic(student(x))
            loss(student(x), teacher(x)).backward()

    assert [(m.class_name, m.trained) for m in observation(cell).modules] == [
        ("Linear", True),
        ("Sequential", False),  # the teacher, which is larger
        ("Sequential", False),
        ("MSELoss", False),
    ]


@pytest.mark.parametrize("by_hand", [False, True])
def test_training_that_begins_long_after_evaluation_is_seen(by_hand: bool) -> None:
    net, batches = nn.Linear(8, 3), [(torch.randn(4, 8), torch.randint(0, 3, (4,)))] * 300

    def cell() -> None:
        with torch.no_grad():
            for x, _ in batches:
                net(x)
        if not by_hand:
            cells.train(net, batches)
            return
        for x, y in batches:
            cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]

    assert [m.trained for m in observation(cell).modules] == [True]


def test_what_a_module_is_made_of() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.b(self.a(x).to(torch.bfloat16))
            return result

    plain, last, mixed = (
        Net(),
        Net().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)),
    )
    mixed[1].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(1, 3, 8, 8)
    found = observation(lambda: [m(x) for m in (plain, last, mixed, nn.Linear(8, 2))]).modules
    assert [(m.class_name, m.has_convolution, m.memory_format) for m in found] == [
        ("Sequential", True, "mixed"),
        ("Net", True, "contiguous"),
        ("Net", True, "channels_last"),
        ("Linear", False, None),
    ]
    assert (
        found[1].parameter_dtypes == ("float32", "bfloat16") and found[1].parameter_count == 3 * 4 * 9 + 4 + 4 * 4 + 4
    )


def test_what_cannot_be_described_does_not_harm_the_cell() -> None:
    class Odd(TensorDataset):
        def __len__(self) -> int:
            if inspect.stack()[1].function == "length_of":
                raise RuntimeError("no length for you")
            return super().__len__()

    class Refuses(nn.Linear):
        def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
            raise RuntimeError("do not look")

    net = Refuses(8, 3)
    found = observation(lambda: cells.train(net, DataLoader(Odd(*cells.data(24).tensors), batch_size=4)))
    assert found.loader is not None and found.loader.record.dataset_length is None
    assert found.modules == () and net.weight.grad is not None
    lazy = observation(lambda: nn.LazyLinear(3)(torch.ones(2, 4)))
    assert [m.class_name for m in lazy.modules] == ["LazyLinear"], "as far as it goes"


@pytest.mark.parametrize("where", ["around", "inside", "decorated"])
def test_autocast_is_seen_around_and_inside_of_the_call(where: str) -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "inside"):
                return super().forward(x)

    net: nn.Module = Net(8, 3)
    if where == "decorated":
        net = nn.Linear(8, 3)
        net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)  # type: ignore[method-assign]

    def cell() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
            (nn.Linear(8, 3) if where == "around" else net)(torch.ones(2, 8))
        nn.Flatten()(torch.ones(1, 1))
        with torch.autocast("cpu", torch.bfloat16):  # after the call
            pass

    assert [m.autocast_dtype for m in observation(cell).modules] == ["bfloat16", None]


def test_compiled_modules_are_seen() -> None:
    torch._dynamo.reset()
    outside, inside, in_place = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)) for _ in range(3))
    before, part = torch.compile(outside, backend="eager"), torch.compile(nn.Linear(8, 3), backend="eager")
    assert isinstance(part, nn.Module)
    in_place.compile(backend="eager")
    partly = nn.Sequential(nn.Linear(8, 8), part)

    def cell() -> None:
        for module in (before, in_place, partly, torch.compile(inside, backend="eager")):
            for _ in range(2):
                cross_entropy(module(torch.ones(2, 8)), torch.zeros(2, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks")
        found = observation(cell).modules
    assert [(m.class_name, m.compiled, m.trained) for m in found] == [("Sequential", True, True)] * 4
    torch._dynamo.reset()


def test_a_call_within_a_module_is_not_outermost() -> None:
    class Inner(nn.Linear):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.count = Inner(8, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count == 100:
                next(iter(DataLoader(cells.data(24))))
            result: torch.Tensor = self.inner(x)
            return result

    outer = Outer()
    assert [m.class_name for m in observation(lambda: [outer(torch.ones(2, 8)) for _ in range(120)]).modules] == [
        "Outer"
    ]


# -- scaler, settings, operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_a_gradient_scaler_counts_where_it_scales(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    assert observation(lambda: scaler.scale(torch.ones(()))).grad_scaler is enabled


def test_operators_and_attention_come_from_the_trace(seen: Observation) -> None:
    assert seen.attention == "flash" and "aten::addmm" in seen.operators
    without = observation(lambda: cells.train(nn.Linear(8, 3), DataLoader(cells.data(48), batch_size=4)), trace=True)
    assert without.attention is None and "aten::addmm" in without.operators
    assert observation(lambda: nn.Linear(8, 3)(torch.ones(1, 8))).operators == frozenset()


def test_the_back_end_called_most_is_the_attention() -> None:
    names = {"aten::_scaled_dot_product_attention_math": 2, "aten::_scaled_dot_product_flash_attention_for_cpu": 3}
    assert attention_backend(Counter(names)) == "flash"
    assert attention_backend(Counter({"aten::mm": 5})) is None


def test_tf32_is_the_setting_while_modules_ran_on_such_a_gpu() -> None:
    def cell() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        nn.Linear(8, 3)(torch.ones(1, 8))
        torch.set_float32_matmul_precision(before)

    run, seen = seen_in(cell)
    assert seen.observation(run).tf32 is None, "on a CPU"
    for capability, tf32 in (("7.5", None), ("9.0", True), ("10.0", True)):
        device = Device("cuda", "GPU", 0, details={"compute_capability": capability})
        assert seen.observation(replace(run, device=device)).tf32 is tf32


# -- in nobody's way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_all_is_put_back_after(error: type[BaseException]) -> None:
    """What is left would be seen by the fixture that looks after every test."""

    def cell() -> None:
        with observe():
            assert "patch of Module.__call__" in leftovers(sweep=False)
            cells.train(nn.Linear(8, 3), DataLoader(cells.data(24), batch_size=4))
            raise error("mine")

    with pytest.raises(error, match="mine"):
        cell()


def test_no_object_is_kept() -> None:
    with observe() as seen:
        net, loader = nn.Linear(8, 3), DataLoader(cells.data(24), batch_size=4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        cells.train(net, loader, optimizer)
        refs = [weakref.ref(thing) for thing in (net, loader, optimizer)]
    assert len(seen.modules.facts) == len(seen.loaders.facts) == len(seen.optimizers.facts) == 1
    del net, loader, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_other_threads_are_not_watched() -> None:
    def elsewhere() -> None:
        cells.train(nn.Linear(8, 3), DataLoader(cells.data(24), batch_size=4))

    with observe() as seen:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert not (seen.loaders.facts or seen.optimizers.facts or seen.modules.facts)


def test_module_calls_are_watched_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted() -> bool | None:
        nonlocal calls
        calls += 1
        return tf32_setting()

    monkeypatch.setattr(observer, "tf32_setting", counted)
    untouched = vars(nn.Module)["__call__"]
    net = nn.Linear(8, 3)
    with observe():
        cells.train(net, [(torch.randn(4, 8), torch.randint(0, 3, (4,)))] * 200)
        assert vars(nn.Module)["__call__"] is untouched
        for _ in range(100):
            cells.train(net, DataLoader(cells.data(8), batch_size=1))
    assert 0 < calls <= observer.CALLS_OF_A_SAMPLE * observer.SAMPLES


def test_steps_are_heard_a_few_at_a_time() -> None:
    """What is new later is heard with the next loader; nothing of ours runs in the steps between."""
    from torch.optim import optimizer as hooks

    model, data = nn.Linear(3, 2), TensorDataset(torch.ones(60, 3))
    heard = []
    with observe() as observed:
        for optimizer in (torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())):
            for (x,) in DataLoader(data):
                model(x).sum().backward()
                optimizer.step()
                heard.append(bool(hooks._global_optimizer_post_hooks))
        for _ in range(observer.PASSES_AT_A_TIME + 1):  # and no optimizer steps
            model(x).sum().backward()
        assert not hooks._global_optimizer_post_hooks
    assert [o.class_name for o in observed.optimizers.facts] == ["SGD", "Adam"]
    for epoch in (heard[:60], heard[60:]):
        assert epoch == sorted(epoch, reverse=True) and 5 <= sum(epoch) < 40


def test_the_death_of_a_worker_is_not_swallowed() -> None:
    @observer.guarded
    def note() -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    with pytest.raises(RuntimeError, match="killed by signal"):
        note()


def test_many_objects_are_not_all_kept() -> None:
    found = observation(lambda: [list(DataLoader(cells.data(2))) for _ in range(observer.MOST_OBJECTS + 8)])
    assert len(found.loaders) == observer.MOST_OBJECTS
