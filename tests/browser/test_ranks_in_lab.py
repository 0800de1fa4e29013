"""A cell in two ranks, in JupyterLab: the slow rank stands out while they run, and is named in the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.api.test_cell_ranks import SETUP, of_ranks
from tests.browser.conftest import OpenNotebook

pytestmark = pytest.mark.browser


@pytest.mark.slow("two ranks import torch and train for seconds, as one of them is slow")
def test_the_straggler_stands_out_live(open_notebook: OpenNotebook, tmp_path: Path, shots: Path) -> None:
    own_store = f"import os\nos.environ['GPULAB_DIR'] = {str(tmp_path)!r}\n"  # other tests have ranks, too
    notebook = open_notebook([own_store + SETUP, "%%gpuprofile --ranks 2\ntrain(70)"])
    notebook.run_cell(0)
    notebook.start_cell(1)
    output = notebook.output(1)
    expect(output).to_contain_text("The others wait for rank 1")
    expect(output).to_contain_text("waits for other ranks")
    assert of_ranks(tmp_path)
    notebook.screenshot(shots / "ranks-live.png", output)
    expect(output).to_contain_text("Rank 1 arrives last")
    expect(output).to_contain_text("time.sleep(late_s)")
    notebook.wait_finished(1)
    notebook.screenshot(shots / "ranks-report.png", output)
    assert "The others wait for rank 1" not in output.inner_text(), "the report has taken its place"
    assert not of_ranks(tmp_path)
