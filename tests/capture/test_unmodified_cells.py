"""Unmodified training cells: steps are found as a person counts them, and the cell trains as without us.

The oracle for steps is dumb: a hook of the test's own notes when an optimizer has stepped; each step found must hold
exactly as many of these moments as one turn of the cell's loop makes.
"""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import Struct
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import gpulab
from gpulab.run import Phase, Run, StepFlag
from tests.support import cells_libraries
from tests.support import cells_plain as cells
from tests.support.leftovers import own_frames

Cell = Callable[[list[Any]], None]
State = dict[str, torch.Tensor]

LOADED = "DataLoader and Optimizer.step"
ALONE = "Optimizer.step"


class Case(Struct, frozen=True):
    """What a person counts in a cell. `updates`: optimizer steps in each step; None where they differ."""

    cell: Cell
    steps: int
    source: str = LOADED
    samples: int | None = None
    updates: int | None = 1
    batches: int = 1

    @property
    def name(self) -> str:
        """The cell's."""
        return self.cell.__name__


CASES = [
    Case(cells.one_epoch, 24, samples=96),
    Case(cells.three_epochs, 24, samples=90),
    Case(cells.left_early, 10, samples=40),
    Case(cells.next_by_hand, 12, samples=48),
    Case(cells.endless, 13, samples=52),
    Case(cells.workers, 16, samples=96),
    Case(cells.persistent_workers, 16, samples=96),
    Case(cells.iterable, 14, samples=70),
    Case(cells.scheduled, 24, samples=96),
    Case(cells.accumulated, 6, samples=96, batches=4),
    Case(cells.accumulated_over_epochs, 10, samples=160, batches=4),
    Case(cells.once_per_epoch, 7, samples=140, batches=5),
    Case(cells.scaled, 12, samples=48, updates=None),
    Case(cells.gan, 15, samples=60, updates=2),
    Case(cells.lbfgs, 8, samples=64),
    Case(cells.zipped, 14, samples=2 * (28 + 70), batches=2),
    Case(cells.two_loaders_one_endless, 10, samples=40 + 40, batches=2),
    Case(cells.evaluated, 20, samples=120),
    Case(cells.evaluated_before_and_anew, 30, samples=180),
    Case(cells.evaluated_within_epoch, 20, samples=100),
    Case(cells.evaluated_on_training_data, 24, samples=120),
    Case(cells.evaluated_amid_accumulation, 6, samples=144, batches=4),
    Case(cells.sliced, 24, ALONE, batches=0),
    Case(cells.sliced_scaled_and_scheduled, 24, ALONE, batches=0),
    Case(cells.sliced_gan, 20, ALONE, updates=2, batches=0),
    Case(cells.sliced_lbfgs, 8, ALONE, batches=0),
    Case(cells.optimizers_compared, 20, ALONE, batches=0),
    Case(cells.cached, 20, ALONE, batches=0),
    Case(cells.inference, 15, "DataLoader", samples=60, updates=0),
    Case(cells.inference_without_grad, 15, "DataLoader", samples=60, updates=0),
    Case(cells.inference_left_early, 10, "DataLoader", samples=40, updates=0),
    Case(cells.inference_zipped, 20, "DataLoader", samples=2 * (40 + 90), updates=0, batches=2),
    Case(cells.by_hand, 20, "DataLoader", samples=80, updates=0),
    Case(cells.by_hand_on_data, 20, "DataLoader", samples=80, updates=0),
    Case(cells.six_steps, 6, samples=24),
    Case(cells_libraries.accelerated, 22, samples=84),
    Case(cells_libraries.accelerated_accumulation, 8, samples=128, batches=4),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on a busy machine: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library may reach for the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


# -- running a cell with and without gpulab ------------------------------------------------------------------------


def plain(cell: Cell) -> tuple[State, list[State]]:
    """The state after the bare cell, and its weights after each optimizer step."""
    keep: list[Any] = []
    history: list[State] = []
    with _seeded(), _on_update(lambda _: history.append(_weights(keep))):
        cell(keep)
        return _state(keep), history


def profiled(cell: Cell, **options: Any) -> tuple[Run, State, list[int], gpulab.profile]:
    """The run of the cell, the state after it, and when optimizers stepped (ns since the run began)."""
    keep: list[Any] = []
    moments: list[int] = []
    code = inspect.getsource(getattr(cell, "func", cell))
    with _seeded(), _on_update(moments.append):
        with gpulab.profile(cell.__name__, **{"show": False, "save": False, "code": code, **options}) as p:
            cell(keep)
        after = _state(keep)
    assert p._capture is not None
    origin = p._capture._origin_ns
    return p.run, after, [m - origin for m in moments], p


def training(batches: Iterable[Any], keep: list[Any] | None = None) -> Iterator[int]:
    """A small training on these batches: the number of each step that it has made."""
    net = cells.model([] if keep is None else keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield i


def of_loader(samples: int) -> Iterable[Any]:
    return torch.utils.data.DataLoader(cells.data(samples), batch_size=4)


@contextmanager
def _seeded() -> Iterator[None]:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    yield


@contextmanager
def _on_update(note: Callable[[int], None]) -> Iterator[None]:
    handle = register_optimizer_step_post_hook(lambda *_: note(time.perf_counter_ns()))
    try:
        yield
    finally:
        handle.remove()


def _weights(keep: list[Any]) -> State:
    """Parameters of what the cell keeps; other things are not yet final while it runs."""
    found: State = {}
    for i, kept in enumerate(keep):
        if isinstance(kept, nn.Module):
            found |= {f"{i}.{k}": v.detach().clone() for k, v in kept.state_dict().items()}
        elif isinstance(kept, torch.Tensor):
            found[str(i)] = kept.detach().clone()
    return found


def _state(keep: list[Any]) -> State:
    """Everything that training has left: weights, schedulers, scalers, and the three streams of random numbers."""
    books = [str(k.state_dict()) for k in keep if not isinstance(k, nn.Module | torch.Tensor)]
    streams = [*books, str(random.getstate()), str(np.random.get_state())]
    text = "".join(streams).encode()
    return _weights(keep) | {
        "torch": torch.get_rng_state(),
        "others": torch.frombuffer(bytearray(text), dtype=torch.uint8),
    }


def same(a: State, b: State) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- what must hold for each run -----------------------------------------------------------------------------------


def assert_lawful(run: Run, p: gpulab.profile) -> None:
    """The record's own arithmetic, the phases, and the accounting of the profiled steps."""
    run.check()
    steps, known = run.steps, p.report.facts
    traced = set(run.traced_numbers)
    assert traced <= set(steps.number[steps.phase == Phase.TRACED].tolist())
    counted = set(steps.number[known.selection.rows].tolist())
    assert not traced & counted, "a traced step counts as an untraced one"
    if len(steps) >= 6:
        assert traced, f"no traced step: {run.missing} {run.choices}"
        assert counted, "no untraced step"
        assert known.breakdown is not None
    if known.breakdown is not None:
        assert not known.breakdown.whole_window or not len(steps)
        for step in known.breakdown.steps:
            assert sum(step.parts_ns.values()) == step.end_ns - step.start_ns
            assert min(step.parts_ns.values()) >= 0
    assert p.report.text(full=True)


def assert_counted(case: Case, run: Run, moments: list[int]) -> None:
    """Steps are where a person sees them."""
    steps = run.steps
    assert len(steps) == case.steps
    assert run.step_source == case.source
    if case.updates is not None:
        bounds = zip(steps.start_ns.tolist(), steps.end_ns.tolist(), strict=True)
        assert [sum(start <= m <= end for m in moments) for start, end in bounds] == [case.updates] * case.steps
    assert steps.batch_count.tolist() == [case.batches] * case.steps
    if case.samples is not None:
        assert (steps.sample_count >= 0).all() and int(steps.sample_count.sum()) == case.samples
    if case.batches != 0:
        assert run.loader is not None and (steps.data_wait_ns > 0).any()
        if case.batches == 1 and case.samples is not None:
            assert run.loader.batch_size == -(-case.samples // case.steps), "of the loader that feeds training"


def judged(case: Case) -> tuple[Run, gpulab.profile]:
    """Its run, which has the steps that a person counts, and has changed nothing."""
    without, _ = plain(case.cell)
    run, with_us, moments, p = profiled(case.cell)
    assert same(without, with_us), "the cell trained otherwise than without gpulab"
    assert run.outcome == "completed"
    assert_counted(case, run, moments)
    assert_lawful(run, p)
    return run, p


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_cell(case: Case) -> None:
    _, p = judged(case)
    if case.samples is not None and case.steps >= 6:
        assert p.report.facts.samples_per_s is not None


# -- libraries that need more than a list --------------------------------------------------------------------------


TRAINERS = {
    "lightning_trainer": ("lightning.pytorch", 20, 100),
    "hugging_face_trainer": ("transformers", 16, 64),
}


@pytest.mark.parametrize(
    ("library", "options", "batches"),
    [
        ("lightning_trainer", {"checked": True}, 1),
        ("lightning_trainer", {"checked": False}, 1),
        ("hugging_face_trainer", {"evaluate": True}, 1),
        ("hugging_face_trainer", {"evaluate": False}, 1),
        ("hugging_face_trainer", {"accumulation": 2}, 2),
    ],
    ids=str,
)
def test_a_trainer(library: str, options: dict[str, Any], batches: int, tmp_path: Path) -> None:
    module, steps, samples = TRAINERS[library]
    pytest.importorskip(module)  # its import draws random numbers: not within the cell
    cell = functools.partial(getattr(cells_libraries, library), folder=tmp_path, **options)
    judged(Case(_named(library, cell), steps // batches, samples=samples, batches=batches))


def test_a_memory_mapped_array(tmp_path: Path) -> None:
    cell = functools.partial(cells.memory_mapped, path=tmp_path / "tokens.bin")
    judged(Case(_named("memory_mapped", cell), 15, ALONE, batches=0))


def _named(name: str, cell: Any) -> Cell:
    cell.__name__ = name
    return cell  # type: ignore[no-any-return]


@pytest.fixture
def compiler() -> Iterator[Any]:
    """torch.compile with nothing compiled before, and nothing left for other tests."""
    import torch._dynamo

    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("loaded", [True, False], ids=["from a loader", "sliced"])
def test_a_compiled_function(loaded: bool, compiler: Any) -> None:
    """`fullgraph` fails if one line of ours cannot be compiled."""

    def compiled(keep: list[Any]) -> None:
        compiler.reset()
        net = cells.model(keep)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(net(x), y)

        points = cells.data(48)
        sliced = (points[i : i + 4] for i in range(0, 48, 4))
        for x, y in torch.utils.data.DataLoader(points, batch_size=4) if loaded else sliced:
            optimizer.zero_grad()
            loss_of(x, y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    case = Case(compiled, 12, samples=48) if loaded else Case(compiled, 12, ALONE, batches=0)
    run, _ = judged(case)
    flagged = run.steps.flags & int(StepFlag.COMPILE)
    assert flagged[0] and not flagged[1:].any(), "compiled once, as without us"


@pytest.mark.usefixtures("compiler")
def test_compiled_code_ends_on_time_and_compiles_nothing_anew() -> None:
    from torch._dynamo.utils import counters

    net = cells.model([])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss_of = torch.compile(lambda x, y: nn.functional.cross_entropy(net(x), y), fullgraph=True, backend="aot_eager")
    x, y = cells.data(8).tensors
    losses = []

    def cell() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())

    before = counters["stats"]["unique_graphs"]
    with gpulab.profile("compiled", steps=5, show=False, save=False) as p:
        cell()
    assert p.run.outcome == "stopped" and len(p.run.steps) == len(losses) == 5
    cell()
    assert counters["stats"]["unique_graphs"] == before + 1


# -- loaders older than the run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("older", ["loader", "iterator"])
def test_what_an_earlier_cell_made(older: str) -> None:
    loader = torch.utils.data.DataLoader(cells.data(60), batch_size=4, shuffle=True)
    feed = loader if older == "loader" else iter(loader)

    def cell(keep: list[Any]) -> None:
        list(training(feed, keep))

    case = Case(cell, 15, samples=60)
    if older == "loader":
        run, _ = judged(case)
    else:
        run, _, moments, p = profiled(cell)
        assert_counted(case, run, moments)
        assert_lawful(run, p)


# -- steps by hand, and none at all ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [0, 1], ids=["nothing else", "beside loader and optimizer"])
def test_steps_marked_by_hand(batches: int) -> None:
    def marked(keep: list[Any]) -> None:
        x = torch.randn(16, 16)
        for _ in training(of_loader(48), keep) if batches else range(12):
            x = torch.tanh(x @ x.T)
            gpulab.step()
        keep.append(x)

    judged(Case(marked, 12, "gpulab.step()", updates=batches, batches=batches))


def judged_whole(cell: Cell, **options: Any) -> tuple[Run, gpulab.profile]:
    """The run of a cell without a step, which has changed nothing."""
    without, _ = plain(cell)
    run, with_us, _, p = profiled(cell, **options)
    assert same(without, with_us)
    assert len(run.steps) == 0 and run.step_source == "whole cell"
    assert_lawful(run, p)
    return run, p


def test_a_cell_without_steps_is_reported_as_a_whole() -> None:
    _, p = judged_whole(cells.tensors_only, whole=True)
    known = p.report.facts.breakdown
    assert known is not None and known.whole_window and known.share["compute"] > 0
    assert "whole run" in p.report.text(full=True)


def test_without_steps_and_without_a_trace_the_report_says_so() -> None:
    run, p = judged_whole(cells.tensors_only)
    assert run.timeline is None
    assert "no training step" in p.report.text(full=True).lower()
    assert any("gpulab.step()" in m.reason for m in run.missing)


def test_a_called_model_is_traced_without_being_asked() -> None:
    run, _ = judged_whole(cells.model_called)
    assert products(run) == 2 * 20


def products(run: Run) -> int:
    """How many of a linear layer its trace has."""
    assert run.timeline is not None
    return [run.timeline.names[i] for i in run.timeline.name_id].count("aten::addmm")


def test_the_trace_of_a_called_model_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulab.capture.windows.TRACE_STEPLESS_LIMIT_S", 0.1)

    def cell(keep: list[Any]) -> None:
        cells.model_called(keep)
        until = time.monotonic() + 60
        while torch._C._autograd._profiler_enabled() and time.monotonic() < until:
            time.sleep(0.01)
        cells.model_called(keep)

    run, _ = judged_whole(cell)
    assert products(run) == 2 * 20
    assert run.observer.window_truncated is not None and "0.1 s" in run.observer.window_truncated


def test_a_request_to_stop_ends_code_without_steps() -> None:
    keep: list[Any] = []
    with gpulab.profile("stop", show=False, save=False) as p:
        cells.model_called(keep)
        assert p._capture is not None
        p._capture.request_stop()
        cells.model_called(keep)
    assert p.run.outcome == "stopped" and p.run.timeline is not None
    assert len(keep) == 3, "the second model was made and not called"


def test_a_model_called_before_training_does_not_spoil_the_steps() -> None:
    def cell(keep: list[Any]) -> None:
        cells.model(keep)(torch.randn(2, 8))
        cells.six_steps(keep)

    judged(Case(cell, 6, samples=24))


# -- the end of a run -----------------------------------------------------------------------------------------------


STOPPED = [
    c
    for c in CASES
    if c.updates and c.name not in ("cached", "optimizers_compared", "workers", "persistent_workers", "six_steps")
]


@pytest.mark.parametrize("case", STOPPED, ids=lambda c: c.name)
def test_steps_ends_a_cell_after_exactly_so_many(case: Case) -> None:
    _, history = plain(case.cell)
    assert case.updates is not None
    steps = min(5, case.steps)
    run, after, _, _ = profiled(case.cell, steps=steps, trace=False)
    assert run.outcome == "stopped" and len(run.steps) == steps
    run.check()
    wanted = history[steps * case.updates - 1]
    assert same(wanted, {k: after[k] for k in wanted}), "not the weights of a cell of so many steps"


@pytest.mark.parametrize("library", ["lightning_trainer", "hugging_face_trainer"])
def test_steps_ends_a_trainer_after_exactly_so_many(library: str, tmp_path: Path) -> None:
    """Also where the trainer evaluates first."""
    pytest.importorskip("lightning.pytorch" if library == "lightning_trainer" else "transformers")
    cell = functools.partial(getattr(cells_libraries, library), folder=tmp_path)
    test_steps_ends_a_cell_after_exactly_so_many(Case(_named(library, cell), 2))


def test_a_stopped_step_is_whole_with_its_scheduler_and_scaler() -> None:
    """Without a loader a step ends inside of `Optimizer.step`: what the loop does after it must still happen."""
    keep: list[Any] = []
    with gpulab.profile("stopped", steps=5, show=False, save=False, trace=False):
        cells.sliced_scaled_and_scheduled(keep)
    _, scheduler, scaler = keep
    assert scheduler.last_epoch == 5
    assert not scaler._per_optimizer_states, "the scaler waits for its update"


@pytest.mark.parametrize("marked", ["loader", "optimizer", "by hand"])
def test_a_request_to_stop_ends_at_a_step(marked: str) -> None:
    def asked() -> Iterator[Any]:
        points = cells.data(96)
        sliced = (points[i : i + 4] for i in range(0, 96, 4))
        for i, batch in enumerate(of_loader(96) if marked == "loader" else sliced):
            if i == 6 and p._capture is not None:
                p._capture.request_stop()
            yield batch

    done: list[int] = []
    with gpulab.profile("stop", show=False, save=False) as p:
        for i in training(asked()):
            done.append(i)
            if marked == "by hand":
                gpulab.step()
    assert p.run.outcome == "stopped" and len(p.run.steps) == len(done) == 7
    p.run.check()


def test_a_request_to_stop_also_ends_an_evaluation() -> None:
    seen = []
    with gpulab.profile("stop", show=False, save=False) as p:
        cells.six_steps([])
        for i, _ in enumerate(of_loader(96)):
            seen.append(i)
            if i == 3 and p._capture is not None:
                p._capture.request_stop()
    assert p.run.outcome == "stopped" and len(p.run.steps) == 6
    assert seen == [0, 1, 2, 3]


def test_code_that_swallows_everything_is_asked_again() -> None:
    """A bare `except:` around a batch cannot keep a run from ending; it only costs one more batch."""
    turns = []
    with gpulab.profile("stubborn", steps=3, show=False, save=False, trace=False) as p:
        for _ in range(3):
            try:
                for i in training(of_loader(24)):
                    turns.append(i)
            except:  # noqa: E722
                pass
    assert len(turns) == 3 and len(p.run.steps) == 3


@pytest.mark.parametrize("at", [0, 15])
@pytest.mark.parametrize("error", [ValueError("too hot"), KeyboardInterrupt(), torch.OutOfMemoryError("no more")])
def test_the_cells_exception_passes_and_the_run_is_kept(error: BaseException, at: int) -> None:
    keep: list[Any] = []
    with pytest.raises(type(error)) as caught, gpulab.profile("bad", show=False, save=False) as p:
        cells.failing(keep, error, at)
    assert caught.value is error
    assert not own_frames(error)
    run = p.run
    assert run.outcome == ("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
    assert len(run.steps) == at
    run.check()
    if at >= 6:
        assert run.traced_numbers
    assert p.report.text(full=True)


# -- long and short -------------------------------------------------------------------------------------------------


def test_three_thousand_steps_leave_a_bounded_trace() -> None:
    run, _, moments, p = profiled(cells.many_steps)
    assert len(run.steps) == 3000 == len(moments)
    assert run.timeline is not None and 0 < len(run.timeline) <= 4000
    assert len(run.traced_numbers) <= 8
    assert_lawful(run, p)


@pytest.mark.usefixtures("compiler")
def test_a_run_with_an_earlier_compilation_flags_no_step() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    run, *_ = profiled(cells.six_steps, trace=False)
    assert not (run.steps.flags & int(StepFlag.COMPILE)).any()
