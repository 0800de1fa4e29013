"""The bench in JupyterLab after its edits were applied, one after the other, and after a restart of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenNotebook
from tests.browser.test_bench_in_lab import (
    BENCH,
    EXPERIMENT_MS,
    SETUP,
    SLOW_DISK,
    TRAINING,
    bench_of,
    press,
    rows,
    stop_button,
    toggle,
    wait_for_end,
)
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

CELL = TRAINING.replace("range(100)", "range(99)")  # another cell than those of other notebooks in this folder
LOAD = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n%load_ext gpulab"
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"


@pytest.mark.slow("three rows of a bench measured in blocks, and a kernel that is restarted")
def test_the_bench_survives_edits_and_a_restart(open_notebook: OpenNotebook, shots: Path) -> None:
    notebook = open_notebook([SETUP, CELL, BENCH, "%gpulab apply", LOAD])
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    notebook.run_cell(0)
    notebook.run_cell(1)
    output = notebook.run_cell(2)
    bench, message = bench_of(output), bench_of(output).locator(".gp-message")
    source = notebook.cell(1).locator(".jp-InputArea")
    for name, value in (("workers", "2"), ("batch_size", "8")):
        toggle(bench, name, value)
        press(bench, "Run")
        wait_for_end(notebook)
        press(bench, "Reset")
    expect(rows(bench)).to_have_count(3)

    rows(bench).nth(1).click()
    press(bench, "Apply to the cell")
    expect(message).to_contain_text("The cell now has workers=2")
    expect(source).to_contain_text("num_workers=2")
    expect(bench).to_contain_text("Measured on the cell without workers=2")
    expect(bench.get_by_role("button", name="Run the baseline")).to_be_visible()
    notebook.screenshot(shots / "survives-0-applied.png", of=output)
    rows(bench).nth(1).click()
    rows(bench).nth(2).click()
    expect(bench.locator(".gp-keep")).to_contain_text("Keep batch_size=8 instead of workers=2")
    press(bench, "Apply to the cell")
    expect(message).to_contain_text("The cell now has batch_size=8")
    expect(source).to_contain_text("batch_size=8")
    expect(source).not_to_contain_text("num_workers=2")

    rows(bench).nth(2).click()
    rows(bench).nth(1).click()
    notebook.write(1, f"{CELL}\nprint('by hand')\n")
    press(bench, "Apply to the cell")
    expect(bench.locator(".gp-keep")).to_contain_text("changed by hand")
    notebook.run_cell(3)  # what a front end that keeps its cells from widgets has instead
    expect(notebook.cell(4).locator(".jp-InputArea")).to_contain_text("num_workers=2")
    notebook.screenshot(shots / "survives-1-new-cell.png")

    notebook.page.evaluate(RESTART)
    expect(message).to_contain_text("%gpulab panel opens the bench again")
    notebook.wait_idle()
    notebook.run_cell(5)
    notebook.run_cell(2)
    expect(rows(bench)).to_have_count(3)
    expect(message).to_contain_text("run the cells above first")
    rows(bench).nth(0).click()
    expect(bench.locator(".gp-detail")).to_contain_text("Step breakdown")
    rows(bench).nth(1).click()
    expect(bench.locator(".gp-detail")).to_contain_text("Step time over the run")
    notebook.screenshot(shots / "survives-2-restarted.png", of=output)
    press(bench, "Run the baseline")
    expect(message).to_contain_text("The notebook had no DataLoader, dataset")
    notebook.run_cell(0)
    press(bench, "Run the baseline")
    wait_for_end(notebook)
    expect(message).to_contain_text("Baseline measured")
    toggle(bench, "workers", "1")
    press(bench, "Run")
    expect(rows(bench).nth(1)).to_contain_text("pair", timeout=EXPERIMENT_MS)
    stop_button(notebook).click()
    wait_for_end(notebook)
    expect(rows(bench)).to_have_count(5)
    notebook.screenshot(shots / "survives-3-measured.png", of=output)

    notebook.page.evaluate(RESTART)
    expect(message).to_contain_text("%gpulab panel opens the bench again")
    notebook.wait_idle()
    notebook.run_cell(5)
    notebook.run_cell(2)
    expect(rows(bench)).to_have_count(5)
    expect(message).to_contain_text("The next run measures the baseline again")
    expect(bench.locator(".gp-expected").first).to_be_visible()  # of the stored run
    notebook.screenshot(shots / "survives-4-restarted.png", of=output)
