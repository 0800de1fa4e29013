"""Pauses: saving, evaluation, garbage and compilation are found, with their line; what trains never is."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.breakdown import breakdown, placed
from gpulab.capture import pauses as pauses_module
from gpulab.capture.pauses import MOST, GradOff, Pass, Passes, Pauses, Stretch
from gpulab.capture.torch_hooks import SAVES, install_pauses
from gpulab.run import Pause
from gpulab.tape.marks import Kind, Tape
from tests.support import synthetic
from tests.support.kernel_session import kernel
from tests.support.tapes import tape_of

NO_STEPS = np.zeros(0, dtype=np.int64)
MS = 1_000_000


class Marks:
    """Drives `Passes` as a loop does; each mark takes one unit of time."""

    def __init__(self) -> None:
        self.passes, self.t, self.found = Passes(), 0, list[Pass]()

    def play(self, script: str) -> None:
        """`9(` begins a pass of loader 9, `9` is a batch of it, `9)` its end; `train` is a step."""
        for mark in script.split():
            self.t += 1
            if mark == "train":
                self.found += self.passes.train()
                continue
            self.found += self.passes.request(int(mark[0]), self.t, fresh=mark.endswith("("))
            self.t += 1
            self.passes.answer(self.t, batch=mark.isdigit(), end=mark.endswith(")"))

    def evaluations(self) -> list[tuple[int, int]]:
        self.found += self.passes.finish()
        return [(p.loader, p.batches) for p in self.found]


@pytest.mark.parametrize(
    ("script", "evaluations"),
    [
        ("1( 1 train 1 train 9( 9 9 9 9) 1 train 9( 9 1 train 1)", [(9, 3), (9, 1)]),
        ("1( 2( 1 2 train 1 2 train 1 2 train 1 2 train", []),
        ("1( 1 1) train 1( 1 1) train 1( 1 1) train", []),  # Accelerate: the end is known before the last batch trains
    ],
    ids=["within an epoch, whole or left early", "two loaders feed each step", "one batch ahead"],
)
def test_which_passes_evaluate(script: str, evaluations: list[tuple[int, int]]) -> None:
    marks = Marks()
    marks.play(script)
    assert marks.evaluations() == evaluations


WHOLE = {"train": (1, "1 train "), "accuracy on the training data": (1, "1 "), "evaluate": (9, "9 ")}


@given(st.lists(st.tuples(st.sampled_from(sorted(WHOLE)), st.integers(1, 5)), max_size=12))
def test_whole_passes_in_any_order(plan: list[tuple[str, int]]) -> None:
    marks = Marks()
    for what, batches in plan:
        loader, batch = WHOLE[what]
        marks.play(f"{loader}( {batch * batches}{loader})")
    assert marks.evaluations() == [(WHOLE[what][0], n) for what, n in plan if what != "train"]


def test_left_passes_are_bounded_and_none_is_lost() -> None:
    marks = Marks()
    marks.play("1( " + "1 train 9( 9 " * 500 + "1 train")
    assert len(marks.passes._abandoned) < 100
    assert marks.evaluations() == [(9, 1)] * 500


def test_short_ones_and_those_beyond_the_bound_are_counted() -> None:
    pauses = Pauses()
    for i in range(MOST + 5):
        pauses.add("gc", 10 * i, 10 * i + 2_000_000, None)
    for _ in range(3):
        pauses.add("gc", 0, 100, None)
    more = {s.kind: (s.count, s.total_ns) for s in pauses.finish(NO_STEPS, trains=True)}
    assert len(pauses.stretches) == MOST and more == {"gc": (8, 10_000_300)}


def test_a_pause_of_gpulabs_own_start_or_end_is_none() -> None:
    pauses = Pauses()
    pauses.add("gc", 0, 10, None)
    pauses.begin(100)
    pauses.add("gc", 90, 5_000_000, None)
    pauses.add("gc", 100, 5_000_000, None)
    pauses.end()
    pauses.add("gc", 6_000_000, 9_000_000, None)
    assert pauses.finish(NO_STEPS, trains=True) == ()
    assert [(p.kind, p.start_ns, p.end_ns) for p in pauses.stretches] == [("gc", 100, 5_000_000)]


@pytest.mark.parametrize("starts_ns", [[55_000_000], [500_000, 55_000_000]])
def test_garbage_of_the_start_is_no_pause(starts_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step, or a backward pass before it, may import half of torch."""
    monkeypatch.setattr(pauses_module, "perf_counter_ns", lambda: 50_000_000)
    pauses = Pauses()
    for t_ns in (1_000_000, 60_000_000):
        pauses.add("gc", t_ns, t_ns + 5_000_000, None)
        pauses.add("gc", t_ns, t_ns + 400, None)
        pauses.add("checkpoint_save", t_ns, t_ns + 6_000_000, None)
        pauses.begin_training()
    more = pauses.finish(np.array(starts_ns, dtype=np.int64), trains=True)
    kept = [("checkpoint_save", 1_000_000), ("gc", 60_000_000), ("checkpoint_save", 60_000_000)]
    assert [(p.kind, p.start_ns) for p in pauses.stretches] == kept
    assert [(s.kind, s.count, s.total_ns) for s in more] == [("gc", 1, 400)]


def test_without_training_nothing_is_evaluation() -> None:
    pauses = Pauses()
    for t_ns, (ask, answer) in enumerate(((Kind.ITER, Kind.ITERATOR), (Kind.ASK, Kind.GOT), (Kind.ASK, Kind.END))):
        pauses.read(tape_of([(t_ns, ask, 1), (t_ns, answer, 4)]))
    pauses.finish(NO_STEPS, trains=False)
    assert pauses.stretches == []


def stretches(times: list[tuple[int, int]], spot: Any = ("f", 1, "")) -> GradOff:
    """Gradients off during these times, in ms."""
    grad_off = GradOff()
    for start, end in times:
        grad_off.enter(start * MS)
        grad_off.enter(start * MS + 1)  # a function that switches off what is off already
        grad_off.exit(end * MS - 1, ("inner", 0, ""))
        grad_off.exit(end * MS, spot)
    return grad_off


def test_rare_no_grad_work_is_evaluation_frequent_is_training() -> None:
    starts = np.arange(0, 1000, 10) * MS
    each_tenth = [(t, t + 5) for t in range(100, 1000, 100)]
    each = [(t + 1, t + 4) for t in range(0, 1000, 10)]
    found = stretches(each_tenth).evaluations([], starts)
    assert [(s.start_ns // MS, s.end_ns // MS, s.spot) for s in found] == [(*t, ("f", 1, "")) for t in each_tenth]
    assert stretches(each).evaluations([], starts) == ()
    both = stretches(each)
    both._stretches += stretches(each_tenth, ("sample", 2, ""))._stretches
    assert [s.spot for s in both.evaluations([], starts)] == [("sample", 2, "")] * len(each_tenth)


def test_short_training_or_earlier_no_grad_is_no_evaluation() -> None:
    grad_off = GradOff()
    grad_off.exit(5 * MS, None)
    grad_off.enter(6 * MS)
    grad_off.exit(6 * MS + 999, None)
    grad_off.enter(10 * MS)
    grad_off.train()
    grad_off.exit(20 * MS, None)
    assert grad_off.evaluations([], np.arange(0, 300, 30) * MS) == ()
    grad_off.enter(60 * MS)  # what stays entered, as a generator does that is left early, hides nothing later
    grad_off.train()
    grad_off.enter(70 * MS)
    grad_off.exit(75 * MS, None)
    assert [s.start_ns for s in grad_off.evaluations([], np.arange(0, 300, 30) * MS)] == [70 * MS]


@given(st.lists(st.integers(1, 30), max_size=30), st.lists(st.integers(1, 30), max_size=30))
def test_passes_and_stretches_tell_all_time_of_either_once(stretched: list[int], passed: list[int]) -> None:
    grad_off = stretches([(a, b) for a, b in _apart(stretched)])
    passes = [Stretch(a * MS, b * MS, ("p", i, ""), "1 batch") for i, (a, b) in enumerate(_apart(passed))]
    found = grad_off.evaluations(passes, np.arange(0, 2000) * MS)
    told = {t for s in found for t in range(s.start_ns // MS, s.end_ns // MS)}
    wholly = {t for s in grad_off._stretches for t in range(s.start_ns // MS, s.end_ns // MS) if _inside(s, passes)}
    assert told >= {t for p in passes for t in range(p.start_ns // MS, p.end_ns // MS)}
    assert told >= wholly
    assert sum((s.end_ns - s.start_ns) // MS for s in found) == len(told)


def _apart(lengths: list[int]) -> list[tuple[int, int]]:
    """Stretches with the numbers in turn as gap and length."""
    at, found = 0, []
    for gap, length in zip(lengths[::2], lengths[1::2], strict=False):
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found


def _inside(stretch: Stretch, passes: list[Stretch]) -> bool:
    """Whether no pass begins before the stretch and ends in it, or the other way round."""
    touching = [p for p in passes if p.start_ns < stretch.end_ns and stretch.start_ns < p.end_ns]
    return all(stretch.start_ns <= p.start_ns and p.end_ns <= stretch.end_ns for p in touching)


def test_gradients_switch_as_ever_and_hooks_see_the_users_line() -> None:
    switches = (torch.no_grad, torch.inference_mode)
    before = [dict(vars(s)) for s in switches]
    pauses, tape = Pauses(), Tape()
    layer = torch.nn.Linear(2, 2)

    @torch.inference_mode()
    def sample() -> Any:
        time.sleep(0.002)
        return layer(torch.ones(2))

    with ExitStack() as undo:
        install_pauses(pauses, tape, undo)
        assert not sample().requires_grad and layer(torch.ones(2)).requires_grad
        with suppress(KeyError), torch.no_grad():
            time.sleep(0.002)
            assert not torch.is_grad_enabled()
            raise KeyError
        assert torch.is_grad_enabled()
    assert [dict(vars(s)) for s in switches] == before
    pauses.read(tape.marks())
    pauses.finish(np.arange(0, 100) * MS + time.perf_counter_ns() - 100 * MS, trains=True)
    told = [(p.spot and p.spot[2], p.detail) for p in pauses.stretches if p.kind == "evaluation"]
    name = test_gradients_switch_as_ever_and_hooks_see_the_users_line.__name__
    assert told == [(name, "without gradients")] * 2


def test_hooks_see_the_outermost_save_once_and_change_nothing(tmp_path: Path) -> None:
    before, callbacks = _saves(), list(gc.callbacks)
    pauses, tape = Pauses(), Tape()
    with ExitStack() as undo:
        install_pauses(pauses, tape, undo)
        assert all(now is not then for now, then in zip(_saves(), before, strict=True))
        torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
        with pytest.raises(AttributeError):
            torch.save(lambda: 0, tmp_path / "b.pt")
        with (tmp_path / "a.pt").open() as file:
            os.fsync(file.fileno())
        other = threading.Thread(target=torch.save, args=({}, tmp_path / "d.pt"))
        other.start()
        other.join()
        gc.collect()
    assert _saves() == before and gc.callbacks == callbacks
    saves = [(p.detail, p.spot and p.spot[0]) for p in pauses.stretches if p.kind == "checkpoint_save"]
    assert saves == [(said, __file__) for said in ("torch.save: a.pt", "torch.save: b.pt", "os.fsync")]
    torch.save({}, tmp_path / "c.pt")
    assert len([p for p in pauses.stretches if p.kind == "checkpoint_save"]) == 3


def _saves() -> list[Any]:
    return [getattr(sys.modules[module], name) for module, _, name in SAVES]


SETUP = """
import gc, time, torch, gpulab
%load_ext gpulab
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(8, 2); opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(320, 8), torch.zeros(320).long()), batch_size=16)
valid = DataLoader(TensorDataset(torch.randn(64, 8), torch.zeros(64).long()), batch_size=16)
compiled = torch.compile(model, backend="eager")
@torch.compile(backend="eager", fullgraph=True)
def target(x):
    with torch.no_grad():
        return model(x)
"""

CELL = """%%gpuprofile pauses --no-live
for i, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(compiled(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    if i % 5 == 4:
        torch.save(model.state_dict(), "m.pt")
        gc.collect()
    assert not target(x).requires_grad
    if i % 10 == 9:
        with torch.no_grad():
            for vx, vy in valid:
                compiled(vx)
    if i % 10 == 7:
        with torch.inference_mode():
            time.sleep(0.005)
"""


def test_a_real_cell_names_the_line_of_each_pause(tmp_path: Path) -> None:
    with kernel(tmp_path) as session:
        assert session.run(SETUP).error is None
        answer = session.run(CELL)
        assert answer.error is None
        _, tables = answer.report()
        found = session.value(
            "[[p.kind, p.place >= 0 and str(r.places[p.place]), p.detail, p.end_ns - p.start_ns]"
            " for r in [gpulab.runs['pauses']] for p in r.pauses]"
        )
        document = session.value("gpulab.report(gpulab.runs['pauses']).json()['pauses'][0]")
        left = session.left_behind()
    lines: dict[str, set[str]] = {}
    for kind, line, _, _ in found:
        lines.setdefault(kind, set()).add(line)
    assert lines["checkpoint_save"] == {'line 6 of the cell: torch.save(model.state_dict(), "m.pt")'}
    assert lines["evaluation"] == {
        "line 11 of the cell: for vx, vy in valid:",
        "line 14 of the cell: with torch.inference_mode():",
    }
    assert "line 3 of the cell: loss = nn.functional.cross_entropy(compiled(x), y)" in lines["compile"]
    assert "line 7 of the cell: gc.collect()" in lines["gc"]
    assert len([f for f in found if f[0] == "checkpoint_save"]) == 4
    assert [f[2] for f in found if f[0] == "evaluation"] == ["without gradients", "4 batches"] * 2
    assert "Pauses" in tables and "gc.collect()" in tables
    assert set(document) == {"kind", "start_us", "end_us", "source_line", "detail"}
    assert left == {}


def test_a_pause_not_named_by_the_trace_is_other() -> None:
    for case in (synthetic.cpu_case(), synthetic.gpu_case()):
        run = case.run
        assert run.timeline is not None
        start, end = run.timeline.window_ns
        pauses = tuple(Pause("gc", at, at + (end - start) // 40) for at in range(start, end, (end - start) // 10))
        plain, told = breakdown(run), breakdown(replace(run, pauses=pauses))
        assert plain is not None and told is not None
        for a, b in zip(plain.steps, told.steps, strict=True):
            assert sum(b.parts_ns.values()) == b.end_ns - b.start_ns
            moved = b.parts_ns["other"] - a.parts_ns["other"]
            assert moved == a.parts_ns["unknown"] - b.parts_ns["unknown"] >= 0
        assert told.share["other"] > plain.share["other"] or plain.share["unknown"] == 0
        assert placed(told) is not None


def test_what_most_steps_do_briefly_is_training_when_long() -> None:
    """Clipping gradients takes over a millisecond only where the core was taken away."""
    off, clip, held = GradOff(), ("cell", 5, ""), ("cell", 9, "")
    starts = [step * 100 * MS for step in range(20)]
    for step, start_ns in enumerate(starts):
        off.enter(start_ns)
        off.exit(start_ns + (5 * MS if step % 5 == 4 else MS // 2), clip)
        if step % 5 == 0:
            off.enter(start_ns + 50 * MS)
            off.exit(start_ns + 80 * MS, held)
    evaluations = off.evaluations([], np.array(starts, dtype=np.int64))
    assert [s.spot for s in evaluations] == [held] * 4
