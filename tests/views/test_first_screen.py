"""What stands on the first screen and what does not; test_every_view.py and test_real_reports.py count its lines."""

from __future__ import annotations

from msgspec.structs import replace

from gpulab.diagnosis.headline import Headline
from gpulab.run import Pause, PauseSum
from gpulab.views.layout import Section
from gpulab.views.report.report import Report
from gpulab.views.text import first_screen
from tests.support import synthetic

CASES = synthetic.cases()
MS = 1_000_000


def test_pauses_of_milliseconds_are_not_told() -> None:
    case = CASES["cpu"]
    for longest_ms, told in ((3, False), (300, True)):
        pauses = (Pause("gc", 100 * MS, (100 + longest_ms) * MS),)
        run = replace(case.run, pauses=pauses, more_pauses=(PauseSum("gc", 3, 900_000),))
        shown = Report(replace(case.facts, run=run), case.diagnosis)
        assert ("collecting garbage" in shown.text(full=True)) == told


def test_an_edit_without_room_is_its_added_lines() -> None:
    """A climb's ladder may fill the screen: what to write still stands on it."""
    code = "--- a\n+++ b\n@@ -1 +1 @@\n-loader = DataLoader(data)\n+loader = DataLoader(data, num_workers=2)"
    code += "\n " * 30
    edit = Section("Keep it", code=code, lines=("This edit makes it permanent:",))
    shown = first_screen("a", Headline("k", "It is faster.", "Measured.", "good"), (edit,), "The rest: …")
    assert "  Keep it: +loader = DataLoader(data, num_workers=2)" in shown.splitlines()
