"""The bench in JupyterLab as its user meets it: toggles, rows that grow, two side by side, the edit, and what stays."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, expect

from tests.browser import test_live_view_in_lab as live
from tests.browser.conftest import OpenNotebook
from tests.browser.jupyterlab_page import NotebookPage
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

OLDER_KERNELS = ["gpulab-ipykernel6", *os.environ.get("GPULAB_TEST_KERNELS", "").split()]
EXPERIMENT_MS = 300_000  # an experiment may take its minute on a slow machine, and its runs with a trace before it

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
from torch import nn
from torch.utils.data import DataLoader
%load_ext gpulab
from slow_disk import SlowDisk
dataset = SlowDisk()
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 32 * 32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_function = nn.CrossEntropyLoss()
"""
SLOW_DISK = """
import time
import torch

class SlowDisk(torch.utils.data.Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        time.sleep(0.004)  # waits, and takes no core: two workers are faster on any machine
        return torch.full((1, 32, 32), index / 480), index % 10
"""
TRAINING = """%%gpuprofile --steps 12 --no-live
loader = DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
for epoch in range(100):
    for images, labels in loader:
        loss = loss_function(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if torch.rand(()) < 0.1:
            print("a word from the cell")
"""
BENCH = "%gpulab panel"
TRY = re.compile(r"^Try workers=\d+$")
OPEN = "Try other settings"
TF32_REFUSED = "TF32 needs an NVIDIA GPU, and this run's device is the CPU"
INTERVAL = re.compile(r"\(.*–.*\)")
FIRST_FIGURES = re.compile(r"\d× so far, 1 pair")
WITHOUT_CONTROL = """
() => {
  let kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  while (!Object.hasOwn(kernel, "sendControlMessage")) kernel = Object.getPrototypeOf(kernel);
  delete kernel.sendControlMessage;
}
"""
LEFT_BEHIND = f"""
sys.path.append({str(ROOT)!r})
import threading, ipywidgets
from tests.support.leftovers import is_own_code
print("threads:", [t.name for t in threading.enumerate() if "gpulab" in t.name])
print("handlers:", [name for name in get_ipython().kernel.control_handlers if "gpulab" in name])
print("widgets:", len(ipywidgets.widgets.widget._instances))
print("patched:", is_own_code(torch.utils.data.DataLoader.__iter__))
print("stdout:", type(sys.stdout).__name__, type(sys.stderr).__name__)
"""


def bench_of(output: Locator) -> Locator:
    """The live one: the same as HTML stands before it, hidden."""
    return output.locator(".gp-bench:not(.gp-static)")


def toggle(bench: Locator, name: str, value: str) -> None:
    control = bench.locator(f'[data-toggle="{name}"]').locator("input, select")
    if control.evaluate("e => e.tagName") == "SELECT":
        control.select_option(value)
    elif control.get_attribute("type") == "checkbox":
        control.set_checked(value == "on")
    else:
        control.fill(value)
        control.press("Enter")
    expect(bench.locator(f'[data-toggle="{name}"][data-changed]')).to_be_visible()


def rows(bench: Locator) -> Locator:
    return bench.locator(".gp-rows > tbody > tr")


def press(bench: Locator, name: str) -> None:
    bench.get_by_role("button", name=name, exact=True).click()


def stop_button(notebook: NotebookPage) -> Locator:
    """Wherever it is: in the bench, or over the page."""
    return notebook.page.get_by_role("button", name="Stop", exact=True)


def wait_for_end(notebook: NotebookPage) -> None:
    expect(stop_button(notebook)).to_be_hidden(timeout=EXPERIMENT_MS)


def do(row: Locator, name: str) -> None:
    row.locator("summary").click()
    row.get_by_role("button", name=name, exact=True).click()


def expect_nothing_left(notebook: NotebookPage, index: int) -> None:
    left = notebook.run_cell(index)
    for line in ("threads: []", "handlers: []", "widgets: 0", "patched: False", "stdout: OutStream OutStream"):
        expect(left).to_contain_text(line)


@pytest.mark.slow("four rows of a bench measured in blocks, and a page that is opened again")
def test_the_bench_grows_and_stays(open_notebook: OpenNotebook, shots: Path) -> None:
    notebook = open_notebook([SETUP, TRAINING, BENCH, LEFT_BEHIND])
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    notebook.run_cell(0)
    report = notebook.run_cell(1)
    expect(report.get_by_role("button", name=TRY)).to_be_visible()
    expect(report.get_by_role("button", name=OPEN)).to_be_visible()
    output = notebook.run_cell(2)
    expect(report.get_by_role("button")).to_have_count(0)  # only the latest report has them
    bench = bench_of(output)
    expect(rows(bench)).to_have_count(1)  # the cell as it ran, which is not run again
    expect(rows(bench)).to_contain_text("baseline")
    expect(bench.locator(".gp-expected").first).to_contain_text("expected")
    expect(bench.locator(".gp-fixed")).to_contain_text("not apply here")
    bench.locator(".gp-fixed summary").click()
    expect(bench).to_contain_text(TF32_REFUSED)
    notebook.screenshot(shots / "bench-0-fresh.png", of=output)

    toggle(bench, "workers", "2")
    press(bench, "Run")
    row = rows(bench).nth(1)
    expect(row).to_contain_text(FIRST_FIGURES, timeout=EXPERIMENT_MS)
    notebook.cell(0).scroll_into_view_if_needed()
    expect(stop_button(notebook)).to_be_in_viewport()
    notebook.screenshot(shots / "bench-1-running.png")
    expect(bench.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    expect(row).to_contain_text(INTERVAL, timeout=EXPERIMENT_MS)
    wait_for_end(notebook)
    expect(bench.locator(".gp-message")).to_contain_text(re.compile("workers=2"))

    toggle(bench, "batch_size", "8")
    press(bench, "Run")
    expect(rows(bench).nth(2)).to_contain_text("pair", timeout=EXPERIMENT_MS)
    stop_button(notebook).click()
    wait_for_end(notebook)
    expect(bench).not_to_contain_text("KeyboardInterrupt")
    press(bench, "Reset")
    expect(bench.locator("[data-toggle][data-changed]")).to_have_count(0)

    rows(bench).nth(0).click()
    expect(bench.locator(".gp-detail")).to_contain_text("Step breakdown")  # the report of one run
    rows(bench).nth(1).focus()
    notebook.page.keyboard.press("Enter")
    expect(bench.locator(".gp-detail")).to_contain_text("Step time over the run")  # two side by side
    expect(bench.locator('tr[aria-selected="true"]')).to_have_count(2)
    notebook.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    for theme in ("dark", "light"):
        for width in (1280, 500):
            notebook.set_theme(theme)
            notebook.page.set_viewport_size({"width": width, "height": 1080})
            notebook.page.wait_for_timeout(500)
            assert bench.evaluate("e => e.scrollWidth <= e.clientWidth"), "nothing is cut"
            notebook.screenshot(shots / f"bench-2-{theme}-{width}.png", of=output)
    notebook.page.set_viewport_size({"width": 1280, "height": 1080})

    do(rows(bench).nth(2), "Rename")
    notebook.page.keyboard.type("small batches")
    notebook.page.keyboard.press("Enter")
    expect(rows(bench).nth(2)).to_contain_text("small batches")
    do(rows(bench).nth(2), "Pin")
    expect(rows(bench).nth(1)).to_contain_text("small batches")
    do(rows(bench).nth(1), "Remove")
    expect(rows(bench)).to_have_count(2)
    press(bench, "Apply to the cell")
    expect(bench.locator(".gp-message")).to_contain_text("The cell now has workers=2")
    expect(notebook.cell(1).locator(".jp-InputArea")).to_contain_text("num_workers=2")

    notebook.save()
    notebook.reload()
    expect(rows(bench)).to_have_count(2)  # the kernel goes on, and so does the widget
    press(bench, "Close")
    expect(bench).to_have_count(0)
    expect(rows(output)).to_have_count(2)  # as HTML
    expect_nothing_left(notebook, 3)

    notebook.run_cell(2)
    expect(rows(bench)).to_have_count(2)
    notebook.save()
    notebook.command("kernelmenu:shutdown")
    notebook.reload(kernel=False)
    expect(rows(output.locator(".gp-static"))).to_have_count(2)
    notebook.page.wait_for_timeout(3000)
    notebook.screenshot(shots / "bench-3-without-kernel.png")
    assert "Error displaying widget" not in notebook.output(2).inner_text()
    nbformat.validate(nbformat.read(notebook.path, 4))


@pytest.mark.slow("three rows, each stopped in another way, and a kernel that is restarted")
@pytest.mark.parametrize("kernel", OLDER_KERNELS)
def test_live_view_and_bench_stop_on_an_older_kernel(open_notebook: OpenNotebook, kernel: str, shots: Path) -> None:
    live_cells = (live.SETUP, live.PLAY, live.LEFT_BEHIND)
    notebook = open_notebook([*live_cells, SETUP, TRAINING, BENCH, LEFT_BEHIND], kernel=kernel)
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    shown = notebook.run_cell(0)
    if kernel == "gpulab-ipykernel6":
        expect(shown).to_contain_text("ipykernel 6.31")
    output = live.watch_the_curve_grow(notebook, 1, "device: CPU")
    live.stop(output)
    expect(output.locator("#report")).to_have_text("stopped by the button: True")
    live.expect_nothing_left(notebook, 2)

    notebook.run_cell(3)
    notebook.run_cell(4)
    bench = bench_of(notebook.run_cell(5))

    def measure() -> None:
        press(bench, "Run")
        expect(rows(bench).nth(1)).to_contain_text("pair", timeout=EXPERIMENT_MS)

    expect(bench.locator(".gp-expected").first).to_be_visible()
    toggle(bench, "workers", "2")
    measure()
    stop_button(notebook).click()
    wait_for_end(notebook)
    expect(bench).to_contain_text("workers=2")
    expect(bench).not_to_contain_text("KeyboardInterrupt")

    measure()
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:interrupt-kernel'); }")
    wait_for_end(notebook)
    expect(bench).to_contain_text("Interrupted")

    notebook.page.evaluate(WITHOUT_CONTROL)
    measure()
    stop_button(notebook).click()
    wait_for_end(notebook)
    expect(bench).to_contain_text(re.compile("Interrupted|workers=2"))
    expect(bench).not_to_contain_text("KeyboardInterrupt")
    press(bench, "Close")
    expect_nothing_left(notebook, 6)

    notebook.run_cell(5)
    notebook.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(bench.locator(".gp-message")).to_contain_text("The kernel was restarted")
    notebook.wait_idle()
    notebook.run_cell(3)
    notebook.run_cell(4)
    notebook.run_cell(5)
    expect(rows(bench)).to_have_count(2)  # they are on disk
