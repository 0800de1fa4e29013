"""Where reading is interrupted, all marks are read again, from memory and journal: none is lost, none counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulab.capture.pauses.pauses import Pauses
from gpulab.capture.reader import Reader
from gpulab.store.journal import Journal
from gpulab.tape.marks import Marks, Tape
from gpulab.tape.step_finder import StepFinder
from tests.support.tapes import steps_by_hand


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
