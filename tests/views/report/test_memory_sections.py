"""The Memory section of a report, and the table of owners."""

from __future__ import annotations

from gpulab.memory_record import Holding, Ledger, Survey
from gpulab.views.memory import Owners
from gpulab.views.report.memory_sections import _drawing


def test_the_picture_over_the_steps_is_no_text() -> None:
    ledgers = [Ledger("cpu", step, "update", (Holding("variables", "features", step << 20),)) for step in (1, 4)]
    drawing = _drawing(ledgers)
    assert hasattr(drawing, "__html__") and "<svg" in drawing and "&lt;" not in drawing


def test_an_output_is_freed_by_the_command() -> None:
    row = Holding("saved activations", "Out[7]", 5 << 20, others=("_oh", "_7", "___"))
    text = Owners(Survey({"cpu": (row,)}, {})).text()
    assert "%gpulab memory --free out: 5.00 MiB come back" in text and "del " not in text
