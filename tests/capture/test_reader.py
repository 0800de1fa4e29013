"""What happens while nobody looks: interrupts, faults of ours and Stop cost no step, and none is cut in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import gpulab
from gpulab.capture.pauses import Pauses
from gpulab.capture.reader import Reader
from gpulab.store.journal import Journal
from gpulab.tape.marks import Marks, Tape
from gpulab.tape.step_finder import StepFinder
from tests.support.tapes import steps_by_hand


def _measured() -> gpulab.profile:
    return gpulab.profile(show=False, save=False, trace=False, device="cpu")


def _steps(count: int) -> Iterator[tuple[int, torch.Tensor, torch.optim.Optimizer]]:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(count, 4)), batch_size=1)):
        yield number, model(x).sum(), optimizer


class Interrupted(BaseException):
    """As a signal raises it."""


@pytest.mark.parametrize("journalled", [0, 1, 2], ids=["in memory", "partly in a journal", "all in a journal"])
def test_an_interrupt_while_reading_costs_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journalled: int
) -> None:
    tape, script = Tape(), steps_by_hand(60, 100)
    reader, journal = Reader(tape, 0, Pauses()), Journal(tmp_path, "20260101-000000-abcdef", 0)
    read = StepFinder.read

    def interrupted(finder: StepFinder, marks: Marks) -> None:
        read(finder, marks[: len(marks) // 2])
        raise Interrupted

    for turn, chunk in enumerate((script[:60], script[60:120], script[120:])):
        tape._waiting.extend(number for mark in chunk.tolist() for number in mark)
        if turn < journalled:
            reader.write(journal)
        if turn == 1:
            with monkeypatch.context() as patch:
                patch.setattr(StepFinder, "read", interrupted)
                with pytest.raises(Interrupted):
                    reader.read()
        else:
            reader.read()
    assert reader.finish(6_000).start_ns.tolist() == list(range(0, 6_000, 100))
    journal.remove()


@pytest.mark.parametrize("late", [2, 150])
def test_stop_ends_between_two_steps(late: int) -> None:
    """Also where the steps before were not looked at."""
    done = list[str]()
    with _measured() as p:
        for number, loss, optimizer in _steps(300):
            if number == late:
                assert p._capture is not None
                p._capture.request_stop()
            loss.backward()  # type: ignore[no-untyped-call]
            done.append("backward")
            optimizer.step()
            done.append("step")
    assert done == ["backward", "step"] * len(p.run.steps) and len(p.run.steps) == late + 1


@pytest.mark.parametrize("late", [20, 500])
def test_a_fault_of_ours_leaves_the_loop_alone(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = StepFinder.read

    def failing(finder: StepFinder, marks: Marks) -> None:
        rest = late - finder._mark_count
        read(finder, marks[:rest])
        if rest < len(marks):
            raise ValueError("no step")

    monkeypatch.setattr(StepFinder, "read", failing)
    with _measured() as p:
        for _, loss, optimizer in _steps(300):
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert [m.reason for m in p.run.missing if m.key == "steps"] == [
        "gpulab failed while measuring (ValueError: no step)"
    ]
    assert len(p.run.steps) < 300
