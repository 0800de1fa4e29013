"""The panel in JupyterLab as its user meets it: a cell with a slow dataset, workers from 0 to 2, the side-by-side."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
PANEL = "%gpulab panel"
OFFER = "from gpulab.panel.opening import offer_panel; offer_panel()"
BUTTON = "Turn a knob on this cell"
LOOKED = "This is what the cell has."
TF32_REFUSED = "TF32 is a format of NVIDIA GPUs, and this run's device is the CPU"
BLOCK = re.compile(r"block (\d+) of \d+: ")
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


def number_field(panel: Locator, title: str) -> Locator:
    """The number field in a knob's row: the first after its title."""
    return panel.locator(
        f"xpath=.//*[normalize-space()='{title}' or normalize-space()='● {title}']/following::input[1]"
    )


def wait_for_end(panel: Locator) -> None:
    expect(panel.get_by_role("button", name="Stop", exact=True)).to_be_disabled(timeout=EXPERIMENT_MS)


def press(panel: Locator, name: str) -> None:
    panel.get_by_role("button", name=name, exact=True).click()


def look(panel: Locator) -> None:
    press(panel, "Look at the cell")
    expect(panel).to_contain_text(LOOKED, timeout=EXPERIMENT_MS)


def compare_workers(panel: Locator) -> None:
    """Workers from 0 to 2, until the blocks run."""
    workers = number_field(panel, "Workers")
    workers.fill("2")
    workers.press("Tab")
    expect(panel).to_contain_text("● Workers")
    press(panel, "Compare A/B")
    expect(panel).to_contain_text(BLOCK, timeout=EXPERIMENT_MS)


def expect_nothing_left(notebook: NotebookPage, index: int) -> None:
    left = notebook.run_cell(index)
    for line in ("threads: []", "handlers: []", "widgets: 0", "patched: False", "stdout: OutStream OutStream"):
        expect(left).to_contain_text(line)


@pytest.mark.slow("two comparisons of the cell in blocks, and a page that is opened again")
def test_the_panel(open_notebook: OpenNotebook, shots: Path) -> None:
    notebook = open_notebook([SETUP, TRAINING, OFFER, LEFT_BEHIND])
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    notebook.run_cell(0)
    report = notebook.run_cell(1)
    expect(report.get_by_role("button", name=BUTTON)).to_be_visible()
    output = notebook.run_cell(2)
    expect(report.get_by_role("button")).to_have_count(0)  # only the latest report has one
    expect(report).to_contain_text("%gpulab panel")
    press(output, BUTTON)
    panel = output.locator(".gpulab-panel")
    expect(panel).to_contain_text("loader = DataLoader(dataset")
    expect(output.get_by_role("button", name=BUTTON)).to_have_count(0)
    expect(panel).to_contain_text("as found: 0")  # as the profiled cell had it
    expect(panel).to_contain_text("when it last ran")
    for button in ("Look at the cell", "Run", "Compare A/B", "Reset", "Close"):
        expect(panel.get_by_role("button", name=button, exact=True)).to_be_visible()
    notebook.screenshot(shots / "panel-0-fresh.png", of=panel)
    look(panel)
    expect(panel).to_contain_text(TF32_REFUSED)
    notebook.screenshot(shots / "panel-1-looked.png", of=panel)

    expect(number_field(panel, "Workers")).to_have_value("0")
    compare_workers(panel)
    expect(panel).to_contain_text(re.compile(r"block \d+ of \d+: .* of (about|at most) \d+ s"))
    notebook.screenshot(shots / "panel-2-comparing.png", of=panel)
    first = BLOCK.search(panel.inner_text())
    assert first is not None
    later = rf"block (?!{first[1]} )\d+ of \d+: "  # the kernel is busy, and the panel moves on
    expect(panel).to_contain_text(re.compile(later), timeout=EXPERIMENT_MS)
    expect(panel.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    wait_for_end(panel)
    expect(panel).to_contain_text(re.compile(r"(Faster|Undecided): workers=2 is .*"))
    expect(output).to_contain_text(re.compile("aiting for the DataLoader|Other programs took cores"))
    notebook.page.set_viewport_size({"width": 1280, "height": 3400})
    for theme in ("dark", "light"):
        notebook.set_theme(theme)
        notebook.page.wait_for_timeout(500)
        notebook.screenshot(shots / f"panel-3-{theme}.png", of=notebook.cell(2))

    compare_workers(panel)  # it can begin again
    press(panel, "Stop")
    wait_for_end(panel)
    expect(panel).to_contain_text("workers=2")
    expect(panel).not_to_contain_text("KeyboardInterrupt")
    press(panel, "Close")
    expect(panel).to_have_count(0)
    expect(output).to_contain_text("95 % interval")  # the result stays
    expect_nothing_left(notebook, 3)

    press(notebook.run_cell(2), BUTTON)
    expect(panel).to_be_visible()
    notebook.save()
    notebook.page.wait_for_timeout(1000)
    notebook.command("kernelmenu:shutdown")
    notebook.reload(kernel=False)
    expect(notebook.output(2)).to_contain_text("The knobs of this cell stood here.")
    notebook.page.wait_for_timeout(3000)
    notebook.screenshot(shots / "panel-reopened.png")
    assert "Error displaying widget" not in notebook.output(2).inner_text()


@pytest.mark.slow("three comparisons, each with its full runs before it is stopped")
@pytest.mark.parametrize("kernel", OLDER_KERNELS)
def test_live_view_and_panel_stop_on_an_older_kernel(open_notebook: OpenNotebook, kernel: str, shots: Path) -> None:
    live_cells = (live.SETUP, live.PLAY, live.LEFT_BEHIND)
    notebook = open_notebook([*live_cells, SETUP, TRAINING, PANEL, LEFT_BEHIND], kernel=kernel)
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
    panel = notebook.run_cell(5).locator(".gpulab-panel")
    look(panel)
    compare_workers(panel)
    press(panel, "Stop")
    wait_for_end(panel)
    expect(panel).to_contain_text("workers=2")
    expect(panel).not_to_contain_text("KeyboardInterrupt")

    compare_workers(panel)
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:interrupt-kernel'); }")
    wait_for_end(panel)
    expect(panel).to_contain_text("Interrupted")

    notebook.page.evaluate(WITHOUT_CONTROL)
    compare_workers(panel)
    press(panel, "Stop")
    wait_for_end(panel)
    expect(panel).to_contain_text(re.compile("Interrupted|workers=2"))
    expect(panel).not_to_contain_text("KeyboardInterrupt")
    press(panel, "Close")
    expect_nothing_left(notebook, 6)
