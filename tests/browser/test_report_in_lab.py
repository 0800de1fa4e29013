"""A report in JupyterLab: in both themes and a narrow window, and in a notebook that was saved and opened again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.jupyterlab_page import PATIENCE_MS, LabServer, NotebookPage
from tests.browser.test_panel_in_lab import SETUP, SLOW_DISK, TRAINING

pytestmark = pytest.mark.browser

PROFILED = TRAINING
DEAD = "Error displaying widget"
WIDER_THAN_ITS_PLACE = """
(output) => {
  const end = output.getBoundingClientRect().right + 2;
  const ends = (e) => e.getBoundingClientRect().right;
  const scrolls = (e) => e !== output && !e.classList.contains("gpulab") && (
    (["auto", "scroll"].includes(getComputedStyle(e).overflowX) && ends(e) <= end) || scrolls(e.parentElement));
  return [...output.querySelectorAll("*")].filter(
    (e) => ends(e) > end && e.getClientRects().length && !e.closest("pre") && !scrolls(e)).map((e) => e.outerHTML);
}
"""


@pytest.fixture
def profiled(open_notebook: Callable[..., NotebookPage], lab_server: LabServer) -> NotebookPage:
    (lab_server.notebooks / "slow_disk.py").write_text(SLOW_DISK)
    notebook = open_notebook(["%load_ext gpulab", SETUP, PROFILED])
    for index in range(3):
        notebook.run_cell(index)
    expect(notebook.output(2)).to_contain_text("would give back", timeout=PATIENCE_MS)
    return notebook


def test_a_report_follows_the_theme_and_the_width(profiled: NotebookPage, shots: Path) -> None:
    output = profiled.output(2)
    inks = []
    for theme in ("light", "dark"):
        profiled.set_theme(theme)
        profiled.screenshot(shots / f"report-{theme}.png")
        ink = output.locator(".gpulab").evaluate("(e) => getComputedStyle(e).color")
        inks.append(sum(float(x) for x in re.findall(r"[\d.]+", ink)[:3]))
        assert output.locator(".gpulab img").count() == 0
    assert inks[0] < 300 < inks[1], "dark ink on light ground, and the other way round"
    profiled.command("application:toggle-left-area")
    profiled.page.set_viewport_size({"width": 420, "height": 900})
    profiled.page.wait_for_timeout(500)
    output.locator("details").evaluate_all("(all) => all.forEach((d) => { d.open = true; })")
    profiled.screenshot(shots / "report-420.png", output)
    assert output.evaluate(WIDER_THAN_ITS_PLACE) == [], "nothing is cut off at 420 pixels"


def test_a_notebook_opened_again_has_no_dead_widget(profiled: NotebookPage, shots: Path) -> None:
    output = profiled.output(2)
    expect(output.get_by_role("button", name="Turn a knob on this cell")).to_be_visible()
    profiled.save()
    profiled.page.wait_for_timeout(1000)
    profiled.command("kernelmenu:shutdown")
    profiled.reload(kernel=False)
    output = profiled.output(2)
    expect(output).to_contain_text("would give back")
    expect(output).to_contain_text("%gpulab panel")
    profiled.page.wait_for_timeout(3000)
    profiled.screenshot(shots / "report-reopened.png")
    assert DEAD not in output.inner_text()
    expect(output.get_by_role("button")).to_have_count(0)


def test_an_open_panel_in_a_saved_notebook_says_how_to_open_it(profiled: NotebookPage, shots: Path) -> None:
    output = profiled.output(2)
    output.get_by_role("button", name="Turn a knob on this cell").click()
    expect(output.locator(".gpulab-panel")).to_be_visible()
    profiled.save()
    profiled.page.wait_for_timeout(1000)
    profiled.command("kernelmenu:shutdown")
    profiled.reload(kernel=False)
    output = profiled.output(2)
    expect(output).to_contain_text("The knobs of this cell stood here.")
    profiled.page.wait_for_timeout(3000)
    profiled.screenshot(shots / "panel-reopened.png")
    assert DEAD not in output.inner_text()
