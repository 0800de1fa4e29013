"""The live view in JupyterLab and Chromium, fed by a scripted run while the kernel is busy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.jupyterlab_page import PATIENCE_MS, NotebookPage
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

MORE_KERNELS = os.environ.get("GPULAB_TEST_KERNELS", "").split()
KERNELS = ["python3", "gpulab-ipykernel6", *MORE_KERNELS]
LIGHT_STEP_LINE = (0x1D, 0x63, 0xC4)

SETUP = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import threading, ipykernel, ipywidgets
from tests.support.scripted_feed import GPU_SERIES, ScriptedFeed
from gpulab.views.running.live_plot import live_view_or_none
threads = set(threading.enumerate())
widgets = set(ipywidgets.widgets.widget._instances)
"""

# begins 101 s into the run: the time axis then ends at 150 s, and cannot change while the test looks at it
PLAY = """
feed = ScriptedFeed()
feed.advance(101)
view = live_view_or_none()
view.begin(feed)
try:
    stopped = feed.play(240)
finally:
    view.end()
    view.replace({"text/html": f"<p id='report'>stopped by the button: {stopped}</p>", "text/plain": "report"})
"""

LEFT_BEHIND = """
import time
kernel = get_ipython().kernel
print("problem", view.problem)
print("threads", [t.name for t in threading.enumerate() if t.name == "gpulab-live-view"])
print("handlers", [name for name in kernel.control_handlers if "gpulab" in name])
print("widgets", len(set(ipywidgets.widgets.widget._instances) - widgets))
"""

# The rightmost pixel column of the canvas in which that colour is drawn, as a fraction of the width.
EXTENT = """
(canvas, [r, g, b]) => {
  const {width, height} = canvas;
  const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
  for (let x = width - 1; x >= 0; x--)
    for (let y = 0; y < height; y++) {
      const i = 4 * (y * width + x);
      if (data[i + 3] > 200 && Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 24)
        return x / width;
    }
  return 0;
}
"""


def step_plot(output: Locator) -> Locator:
    return output.locator("[data-plot=steps] canvas")


def drawn_extent(output: Locator) -> float:
    return float(step_plot(output).evaluate(EXTENT, list(LIGHT_STEP_LINE)))


def wait_until(notebook: NotebookPage, happened: Callable[[], bool], what: str) -> None:
    for _ in range(PATIENCE_MS // 100):
        if happened():
            return
        notebook.page.wait_for_timeout(100)
    raise AssertionError(f"never happened: {what}")


def begin(notebook: NotebookPage) -> Locator:
    notebook.run_cell(0)
    notebook.start_cell(1)
    output = notebook.output(1)
    expect(output.locator(".gp-device")).to_have_text("device: CPU", timeout=PATIENCE_MS)
    wait_until(notebook, lambda: drawn_extent(output) > 0.5, "steps are drawn")
    return output


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_curve_grows_and_stop_works_while_the_cell_is_busy(
    open_notebook: Callable[..., NotebookPage], kernel: str, shots: Path
) -> None:
    notebook = open_notebook([SETUP + "print(ipykernel.__version__)", PLAY, LEFT_BEHIND], kernel=kernel)
    output = begin(notebook)
    if kernel == "gpulab-ipykernel6":
        expect(notebook.output(0)).to_contain_text("6.31")
    before = drawn_extent(output)
    wait_until(notebook, lambda: drawn_extent(output) > before + 0.005, "the curve grows")
    assert notebook.running(1)
    notebook.screenshot(shots / f"live-{kernel}.png")

    output.get_by_role("button", name="Stop").click()
    expect(output.locator("#report")).to_have_text("stopped by the button: True", timeout=PATIENCE_MS)
    expect(output.locator(".gpulab-live")).to_have_count(0)
    expect(output).not_to_contain_text("KeyboardInterrupt")

    left = notebook.run_cell(2)
    expect(left).to_contain_text("problem None")
    expect(left).to_contain_text("threads []")
    expect(left).to_contain_text("handlers []")
    expect(left).to_contain_text("widgets 0")
    assert [text for text in notebook.console if "anywidget" in text or "uPlot" in text] == []


def test_a_kernel_that_does_not_answer_is_interrupted(open_notebook: Callable[..., NotebookPage]) -> None:
    deaf = PLAY.replace("try:", "del get_ipython().kernel.control_handlers['gpulab_stop']\ntry:\n    stopped = None", 1)
    notebook = open_notebook([SETUP, deaf])
    output = begin(notebook)
    output.get_by_role("button", name="Stop").click()
    expect(output).to_contain_text("KeyboardInterrupt", timeout=PATIENCE_MS)
    expect(output.locator("#report")).to_have_text("stopped by the button: None")


def test_the_view_follows_the_theme(open_notebook: Callable[..., NotebookPage], shots: Path) -> None:
    gpu = PLAY.replace(
        "ScriptedFeed()", "ScriptedFeed('device: NVIDIA H100 80GB HBM3 (GPU 0)', GPU_SERIES, total=4000)"
    )
    notebook = open_notebook([SETUP, gpu.replace("advance(101)", "advance(7)")])
    notebook.run_cell(0)
    notebook.start_cell(1)
    live = notebook.output(1).locator(".gpulab-live")
    expect(live).to_have_attribute("data-theme", "light", timeout=PATIENCE_MS)
    expect(live).to_contain_text("DRAM active (NVML GPM)")
    notebook.page.wait_for_timeout(1000)  # a second of curve for the picture
    notebook.screenshot(shots / "live-gpu-light.png", of=live)
    light = step_plot(live).evaluate(EXTENT, list(LIGHT_STEP_LINE))
    notebook.set_theme("dark")
    expect(live).to_have_attribute("data-theme", "dark")
    wait_until(notebook, lambda: drawn_extent(live) == 0, "the light theme's colour is gone from the plot")
    assert light > 0
    notebook.screenshot(shots / "live-gpu-dark.png", of=live)
    live.get_by_role("button", name="Stop").click()
    notebook.wait_finished(1)


ALERT = "Starving for 20 s: 63 % of each step waits for data."

ALERTING = f"""
feed = ScriptedFeed(step_ms=40, wait_ms=25)
feed.advance(30)
view = live_view_or_none()
view.begin(feed)
feed.alert = {ALERT!r}
feed.play(240)  # the button stands for the end of what is wrong: the cell goes on after it
feed.alert = ""
feed.stop_requested.clear()
feed.play(20)
view.end()
"""


def test_an_alert_is_visible_and_goes_away(open_notebook: Callable[..., NotebookPage], shots: Path) -> None:
    notebook = open_notebook([SETUP, ALERTING])
    notebook.run_cell(0)
    notebook.start_cell(1)
    live = notebook.output(1).locator(".gpulab-live")
    alert = live.locator(".gp-alert")
    expect(alert).to_have_text(ALERT, timeout=PATIENCE_MS)
    expect(alert).to_be_visible()
    height = live.bounding_box()
    notebook.screenshot(shots / "live-alert-light.png", of=live)
    light = alert.evaluate("e => getComputedStyle(e).color")
    notebook.set_theme("dark")
    expect(live).to_have_attribute("data-theme", "dark")
    notebook.screenshot(shots / "live-alert-dark.png", of=live)
    assert alert.evaluate("e => getComputedStyle(e).color") != light
    live.get_by_role("button", name="Stop").click()
    expect(alert).to_be_hidden(timeout=PATIENCE_MS)
    assert notebook.running(1)
    after = live.bounding_box()
    assert height is not None and after is not None and after["height"] == height["height"], "nothing jumps"
    notebook.wait_finished(1)


def test_a_reload_after_the_run_shows_the_chart_again(open_notebook: Callable[..., NotebookPage]) -> None:
    cell = "feed = ScriptedFeed(); view = live_view_or_none(); view.begin(feed); feed.advance(4.5); view.end()"
    notebook = open_notebook([SETUP, cell])
    notebook.run_cell(0)
    notebook.run_cell(1)
    expect(notebook.output(1).locator(".gp-phase")).to_have_text("run ended", timeout=PATIENCE_MS)
    steps = notebook.output(1).locator(".gp-progress-text").inner_text()
    notebook.save()
    notebook.reload()
    output = notebook.output(1)
    expect(output.locator(".gp-phase")).to_have_text("run ended", timeout=PATIENCE_MS)
    expect(output.locator(".gp-progress-text")).to_have_text(steps)
    wait_until(notebook, lambda: drawn_extent(output) > 0.5, "the steps are drawn again")
    expect(output.get_by_role("button", name="Stop")).to_be_disabled()
