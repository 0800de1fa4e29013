"""A cell in two ranks, in JupyterLab: the slow rank stands out while they run, and is named in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.api.test_cell_ranks import SETUP, of_ranks
from tests.browser.conftest import OpenNotebook

pytestmark = pytest.mark.browser


def test_the_straggler_stands_out_live(open_notebook: OpenNotebook, shots: Path) -> None:
    notebook = open_notebook([SETUP, "%%gpuprofile --ranks 2\ntrain(100)"])
    notebook.run_cell(0)
    notebook.start_cell(1)
    output = notebook.output(1)
    expect(output).to_contain_text("The others wait for rank 1")
    expect(output).to_contain_text("waits for other ranks")
    notebook.screenshot(shots / "ranks-live.png", output)
    expect(output).to_contain_text("Rank 1 arrives last")
    expect(output).to_contain_text("time.sleep(late_s)")
    notebook.wait_finished(1)
    notebook.screenshot(shots / "ranks-report.png", output)
    assert "The others wait for rank 1" not in output.inner_text(), "the report has taken its place"
    assert not of_ranks()
