"""The live view in JupyterLab and Chromium, fed by a scripted run while the kernel is busy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.jupyterlab_page import NotebookPage, wait_until
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

LIGHT_STEP_LINE = (0x1D, 0x63, 0xC4)
ALERT = "Waiting for data for 20 s: the DataLoader's batches come late."

SETUP = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import os, threading, ipykernel, ipywidgets
from tests.support.scripted_feed import GPU_SERIES, ScriptedFeed
from IPython.display import display
from gpulab.views.live_view import LiveView
from gpulab.views.widgets import running_kernel
threads = set(threading.enumerate())
widgets = set(ipywidgets.widgets.widget._instances)
print("ipykernel", ipykernel.__version__)
"""

# begins 101 s into the run: the time axis then ends at 150 s, and cannot change while the test looks at it
PLAY = """
feed = ScriptedFeed()
feed.advance(101)
view = LiveView(running_kernel())
view.begin(feed)
try:
    stopped = feed.play(240)
finally:
    view.close()
    display({"text/html": f"<p id='report'>stopped by the button: {stopped}</p>", "text/plain": "report"}, raw=True)
"""
SO_FAR = "So far (400 steps), input-bound: 63 % of each step waits on the DataLoader."
ALERTING = f"feed.alert, feed.message = {ALERT!r}, {SO_FAR!r}\n"
ALERTING += "try:\n    while not os.path.exists('calm'): feed.play(0.2)\n    feed.alert = ''"
ON_A_GPU = PLAY.replace("()", "('device: NVIDIA H100 80GB HBM3 (GPU 0)', GPU_SERIES, total=4000)", 1).replace(
    "try:", ALERTING
)
DEAF = PLAY.replace("try:", "del get_ipython().kernel.control_handlers['gpulab_stop']\ntry:\n    stopped = None", 1)
LEFT_BEHIND = """
print("problem", view.problem or None)
print("threads", [t.name for t in threading.enumerate() if t.name == "gpulab-live-view"])
print("handlers", [name for name in get_ipython().kernel.control_handlers if "gpulab" in name])
print("widgets", len(set(ipywidgets.widgets.widget._instances) - widgets))
"""
NOTHING_LEFT = ("problem None", "threads []", "handlers []", "widgets 0")

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


def drawn_extent(output: Locator) -> float:
    return float(output.locator("[data-plot=steps] canvas").evaluate(EXTENT, list(LIGHT_STEP_LINE)))


def watch_the_curve_grow(notebook: NotebookPage, index: int, device: str) -> Locator:
    """The cell's output, once its plot of steps has grown while the cell is busy."""
    notebook.start_cell(index)
    output = notebook.output(index)
    expect(output.locator(".gp-device")).to_have_text(device)
    output.scroll_into_view_if_needed()  # what nobody can see is not drawn
    wait_until(notebook.page, lambda: drawn_extent(output) > 0.5, "steps are drawn")
    before = drawn_extent(output)
    wait_until(notebook.page, lambda: drawn_extent(output) > before + 0.005, "the curve grows")
    assert notebook.running(index)
    return output


def stop(output: Locator) -> None:
    output.get_by_role("button", name="Stop").click()


def expect_nothing_left(notebook: NotebookPage, index: int) -> None:
    left = notebook.run_cell(index)
    for line in NOTHING_LEFT:
        expect(left).to_contain_text(line)


@pytest.mark.slow("two trainings, each watched until it is stopped, and a page without its kernel")
def test_it_grows_alerts_follows_the_theme_and_stops(open_notebook: Callable[..., NotebookPage], shots: Path) -> None:
    notebook = open_notebook([SETUP, ON_A_GPU, LEFT_BEHIND, DEAF, PLAY])
    notebook.run_cell(0)
    output = watch_the_curve_grow(notebook, 1, "device: NVIDIA H100 80GB HBM3 (GPU 0)")
    live, alert = output.locator(".gpulab-live"), output.locator(".gp-alert")
    expect(live).to_have_attribute("data-theme", "light")
    expect(live).to_contain_text("DRAM active (NVML GPM)")
    expect(alert).to_have_text(ALERT)
    expect(alert).to_be_visible()
    expect(live.locator(".gp-message")).to_have_text(SO_FAR)
    expect(live.locator(".gp-phase")).to_have_attribute("title", re.compile("[Ss]teps"))
    notebook.screenshot(shots / "live-light.png", of=live)
    light = alert.evaluate("e => getComputedStyle(e).color")

    notebook.set_theme("dark")
    expect(live).to_have_attribute("data-theme", "dark")
    wait_until(notebook.page, lambda: drawn_extent(live) == 0, "the light theme's colour is gone from the plot")
    assert alert.evaluate("e => getComputedStyle(e).color") != light
    notebook.screenshot(shots / "live-dark.png", of=live)
    height = live.bounding_box()
    notebook.path.with_name("calm").touch()
    expect(alert).to_be_hidden()
    after = live.bounding_box()
    assert height is not None and after is not None and after["height"] == height["height"], "nothing jumps"
    assert notebook.running(1)
    notebook.set_theme("light")

    stop(output)
    expect(output.locator("#report")).to_have_text("stopped by the button: True")
    expect(live).to_have_count(0)
    expect(output).not_to_contain_text("KeyboardInterrupt")
    expect_nothing_left(notebook, 2)

    output = watch_the_curve_grow(notebook, 3, "device: CPU")
    stop(output)  # the kernel does not answer: it is interrupted
    expect(output).to_contain_text("KeyboardInterrupt")
    expect(output.locator("#report")).to_have_text("stopped by the button: None")

    assert [text for text in notebook.console if "anywidget" in text or "uPlot" in text] == []

    output = watch_the_curve_grow(notebook, 4, "device: CPU")
    notebook.page.wait_for_timeout(2500)
    expect(output.locator(".gpulab-live-note")).to_be_hidden()
    notebook.save()
    notebook.page.wait_for_timeout(1000)
    notebook.command("kernelmenu:shutdown")
    notebook.reload(kernel=False)
    expect(notebook.output(4).locator(".gpulab-live-note")).to_contain_text("during this run")
    expect(notebook.output(4).locator(".gpulab-live-note")).to_be_visible()
    notebook.screenshot(shots / "live-reopened.png", of=notebook.cell(4))
    assert "Error displaying widget" not in notebook.output(4).inner_text()
