"""The panel in JupyterLab as its user meets it: a cell with a slow dataset, workers from 0 to 2, the side-by-side."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.jupyterlab_page import LabServer, NotebookPage
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

KERNELS = ["python3", "gpulab-ipykernel6", *os.environ.get("GPULAB_TEST_KERNELS", "").split()]
EXPERIMENT_MS = 300_000  # an experiment may take its minute on a slow machine, and its runs with a trace before it

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
from torch import nn
from torch.utils.data import DataLoader
from slow_disk import SlowDisk
%load_ext gpulab
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


def panel_of(output: Locator) -> Locator:
    return output.locator(".gpulab-panel")


def press(panel: Locator, name: str) -> None:
    panel.get_by_role("button", name=name, exact=True).click()


def number_field(panel: Locator, title: str) -> Locator:
    """The number field in a knob's row: the first after its title."""
    return panel.locator(
        f"xpath=.//*[normalize-space()='{title}' or normalize-space()='● {title}']/following::input[1]"
    )


def wait_for_end(panel: Locator) -> None:
    expect(panel.get_by_role("button", name="Stop", exact=True)).to_be_disabled(timeout=EXPERIMENT_MS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_workers_from_0_to_2_and_the_side_by_side(
    open_notebook: Callable[..., NotebookPage], lab_server: LabServer, kernel: str, shots: Path
) -> None:
    (lab_server.notebooks / "slow_disk.py").write_text(SLOW_DISK)
    notebook = open_notebook([SETUP, TRAINING, PANEL, LEFT_BEHIND], kernel=kernel)
    notebook.run_cell(0)
    notebook.run_cell(1)
    output = notebook.run_cell(2)
    panel = panel_of(output)
    expect(panel).to_contain_text("loader = DataLoader(dataset")
    expect(panel).to_contain_text("as found: 0")  # as the profiled cell had it
    expect(panel).to_contain_text("when it last ran")
    notebook.screenshot(shots / f"panel-{kernel}-0-fresh.png", of=panel)

    for button in ("Look at the cell", "Run", "Compare A/B", "Reset", "Close"):
        expect(panel.get_by_role("button", name=button, exact=True)).to_be_visible()
    press(panel, "Look at the cell")
    expect(panel).to_contain_text("This is what the cell has.", timeout=EXPERIMENT_MS)
    expect(panel).to_contain_text(TF32_REFUSED)
    notebook.screenshot(shots / f"panel-{kernel}-1-looked.png", of=panel)

    workers = number_field(panel, "Workers")
    expect(workers).to_have_value("0")
    workers.fill("2")
    workers.press("Tab")
    expect(panel).to_contain_text("● Workers")
    press(panel, "Compare A/B")
    expect(panel).to_contain_text(re.compile(r"block \d+ of \d+: .* of (about|at most) \d+ s"), timeout=EXPERIMENT_MS)
    notebook.screenshot(shots / f"panel-{kernel}-2-comparing.png", of=panel)
    first = BLOCK.search(panel.inner_text())
    assert first is not None
    later = rf"block (?!{first[1]} )\d+ of \d+: "  # the kernel is busy, and the panel moves on
    expect(panel).to_contain_text(re.compile(later), timeout=EXPERIMENT_MS)
    expect(panel.get_by_role("button", name="Run", exact=True)).to_be_disabled()

    wait_for_end(panel)
    expect(panel).to_contain_text(re.compile(r"(Faster|Undecided): workers=2 is .*"))
    expect(output).to_contain_text(re.compile("aiting for the DataLoader|Other programs took cores"))
    notebook.page.set_viewport_size({"width": 1280, "height": 3400})
    for theme in ("light", "dark"):
        notebook.set_theme(theme)
        notebook.page.wait_for_timeout(500)
        notebook.screenshot(shots / f"panel-{kernel}-3-{theme}.png", of=notebook.cell(2))
    notebook.set_theme("light")

    press(panel, "Close")
    expect(panel).to_have_count(0)
    expect(output).to_contain_text("95 % interval")  # the result stays
    left = notebook.run_cell(3)
    for line in ("threads: []", "handlers: []", "widgets: 0", "patched: False", "stdout: OutStream OutStream"):
        expect(left).to_contain_text(line)


def compare_workers(panel: Locator) -> None:
    """Workers from 0 to 2, until the blocks run."""
    workers = number_field(panel, "Workers")
    workers.fill("2")
    workers.press("Tab")
    expect(panel).to_contain_text("● Workers")
    press(panel, "Compare A/B")
    expect(panel).to_contain_text(BLOCK, timeout=EXPERIMENT_MS)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("control_channel", [True, False])
def test_stop_ends_a_run_that_keeps_the_main_thread_busy(
    open_notebook: Callable[..., NotebookPage], lab_server: LabServer, kernel: str, control_channel: bool
) -> None:
    (lab_server.notebooks / "slow_disk.py").write_text(SLOW_DISK)
    notebook = open_notebook([SETUP, TRAINING, PANEL, LEFT_BEHIND], kernel=kernel)
    notebook.run_cell(0)
    notebook.run_cell(1)
    panel = panel_of(notebook.run_cell(2))
    press(panel, "Look at the cell")
    expect(panel).to_contain_text("This is what the cell has.", timeout=EXPERIMENT_MS)
    if not control_channel:
        notebook.page.evaluate(WITHOUT_CONTROL)
    compare_workers(panel)
    press(panel, "Stop")
    wait_for_end(panel)
    expect(panel).to_contain_text("workers=2" if control_channel else re.compile("Interrupted|workers=2"))
    expect(panel).not_to_contain_text("KeyboardInterrupt")
    press(panel, "Look at the cell")  # it can begin again
    expect(panel).to_contain_text("This is what the cell has.", timeout=EXPERIMENT_MS)
    press(panel, "Close")
    left = notebook.run_cell(3)
    for line in ("threads: []", "handlers: []", "widgets: 0", "patched: False", "stdout: OutStream OutStream"):
        expect(left).to_contain_text(line)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_notebooks_own_interrupt_ends_a_run(
    open_notebook: Callable[..., NotebookPage], lab_server: LabServer, kernel: str
) -> None:
    (lab_server.notebooks / "slow_disk.py").write_text(SLOW_DISK)
    notebook = open_notebook([SETUP, TRAINING, PANEL, LEFT_BEHIND], kernel=kernel)
    notebook.run_cell(0)
    notebook.run_cell(1)
    panel = panel_of(notebook.run_cell(2))
    press(panel, "Look at the cell")
    expect(panel).to_contain_text("This is what the cell has.", timeout=EXPERIMENT_MS)
    compare_workers(panel)
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:interrupt-kernel'); }")
    wait_for_end(panel)
    expect(panel).to_contain_text("Interrupted")


def test_the_button_under_a_report_opens_the_panel_there(
    open_notebook: Callable[..., NotebookPage], lab_server: LabServer
) -> None:
    (lab_server.notebooks / "slow_disk.py").write_text(SLOW_DISK)
    offer = "from gpulab.panel.opening import offer_panel; offer_panel()"
    notebook = open_notebook([SETUP, TRAINING, offer, offer])
    notebook.run_cell(0)
    notebook.run_cell(1)
    first = notebook.run_cell(2)
    expect(first.get_by_role("button", name="Turn a knob on this cell")).to_be_visible()
    second = notebook.run_cell(3)
    expect(first.get_by_role("button")).to_have_count(0)  # only the latest report has one
    expect(first).to_contain_text("%gpulab panel")
    press(second, "Turn a knob on this cell")
    expect(panel_of(second)).to_contain_text("loader = DataLoader(dataset")
    expect(second.get_by_role("button", name="Turn a knob on this cell")).to_have_count(0)
    press(panel_of(second), "Close")
    expect(panel_of(second)).to_have_count(0)
