"""The quick-start notebook as its reader meets it: watch, stop, read in any theme and width, keep, and read again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.browser.conftest import OpenNotebook
from tests.browser.jupyterlab_page import PATIENCE_MS, THEMES, LabServer, NotebookPage, wait_until
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

QUICK_START = ROOT / "notebooks" / "00_quick_start.ipynb"
LOAD, SETUP, _GUESS, TRAINING, _REVEAL, LOOK = range(6)  # its code cells
AS_WRITTEN, ENDLESS = "in range(2):", "in range(100_000):"  # epochs: only Stop ends the longer training
HEADLINE = re.compile(  # on a busy machine the cores come first
    "of each step waits on the DataLoader|no free core"
)
SHOWN: list[str | re.Pattern[str]] = [
    HEADLINE,
    "Step time",
    "Step breakdown",
    "Top operators",
    "About this measurement",
]
LOOK_INSIDE = f"""
import sys, threading, ipywidgets, torch
sys.path.append({str(ROOT)!r})
from gpulab.run import StepFlag
from tests.support.leftovers import is_own_code
print("torn steps:", int(((run.steps.flags & StepFlag.PARTIAL) != 0).sum()))
print("threads:", [t.name for t in threading.enumerate() if "gpulab" in t.name])
print("handlers:", [name for name in get_ipython().kernel.control_handlers if "gpulab" in name])
print("widgets:", len(ipywidgets.widgets.widget._instances))
print("patched:", is_own_code(torch.utils.data.DataLoader.__iter__))
"""
REPORT_BUNDLES = """
(index) => {
  const cells = window.jupyterapp.shell.currentWidget.content.model.toJSON().cells;
  return cells.filter((cell) => cell.cell_type === "code")[index].outputs.map((output) => output.data ?? {})
    .filter((data) => data["text/html"] && [data["text/plain"]].flat().join("").startsWith("gpulab · "));
}
"""
TRUSTED_CELLS = """
() => window.jupyterapp.shell.currentWidget.content.widgets.map((cell) => cell.model)
  .filter((model) => model.type === "code" && model.trusted).length
"""
KERNEL = "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.name ?? 'none'"

OFFER = "Try other settings"
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


@pytest.mark.slow("three pages, and a training that its reader stops and runs again")
def test_watch_stop_keep_and_read_again(
    open_notebook: OpenNotebook, lab_context: BrowserContext, lab_server: LabServer, shots: Path
) -> None:
    written = [cell.source for cell in nbformat.read(QUICK_START, as_version=4).cells if cell.cell_type == "code"]
    assert AS_WRITTEN in written[TRAINING]
    endless = [source.replace(AS_WRITTEN, ENDLESS) for source in written]
    notebook = open_notebook(endless)  # without outputs: JupyterLab trusts again only where all of it ran here
    path = notebook.path
    notebook.run_cell(LOAD)
    notebook.run_cell(SETUP)
    output = notebook.output(TRAINING)
    notebook.start_cell(TRAINING)
    watch_it_grow(notebook, output, shots / "quick-start")

    output.get_by_role("button", name="Stop").click()
    notebook.wait_finished(TRAINING)
    expect_report(output, "stopped")
    expect(output).not_to_contain_text("KeyboardInterrupt")
    expect(output.get_by_role("button", name=OFFER)).to_be_visible()
    expect_ink_of_the_theme_and_no_cut_at_420_pixels(notebook, output, shots)

    save(notebook, path)
    assert "widget-view" not in path.read_text()
    read_without_kernel(lab_context, lab_server, path, shots / "quick-start")
    expect(notebook.run_cell(LOOK)).to_contain_text("quick-start stopped")
    expect_whole_steps_and_nothing_left(notebook)

    notebook.reload()  # the same kernel goes on
    output = notebook.output(TRAINING)
    expect_report(output, "stopped")
    notebook.write(TRAINING, written[TRAINING])
    expect(notebook.run_cell(TRAINING)).to_contain_text("epoch 1: loss")
    expect_report(output, "completed")
    notebook.write(LOOK, written[LOOK])
    expect(notebook.run_cell(LOOK)).to_contain_text("quick-start completed 112 steps")
    expect_whole_steps_and_nothing_left(notebook)
    assert not [text for text in notebook.console if "anywidget" in text or "uPlot" in text]


def watch_it_grow(notebook: NotebookPage, output: Locator, shot: Path) -> None:
    """The steps and the device's curves get more points while the cell runs, in both themes."""
    live = output.locator(".gpulab-live")
    expect(live).to_be_visible()
    live.scroll_into_view_if_needed()  # what is out of sight is not drawn
    for theme in ("light", "dark"):
        set_theme(notebook.page, theme)
        expect(live).to_have_attribute("data-theme", theme)
        expect(live).to_contain_text("device: CPU")
        for plot in ("steps", "percent", "memory"):
            wait_for_points(live, plot, more_than=points(live, plot) + 2)
        assert notebook.running(TRAINING), "all this was drawn while the cell was busy"
        notebook.screenshot(shot.with_name(f"{shot.name}-live-{theme}.png"), of=live)


def points(live: Locator, plot: str) -> int:
    """How many points a plot of the live view has drawn."""
    return int(live.locator(f"[data-plot={plot}] .gp-plot").get_attribute("data-points") or 0)


def wait_for_points(live: Locator, plot: str, more_than: int) -> None:
    wait_until(live.page, lambda: points(live, plot) > more_than, f"more than {more_than} points of {plot}")


def expect_report(output: Locator, outcome: str, *, trusted: bool = True) -> None:
    """Picture, headline and tables stand in the output; of widgets at most the button that opens the bench."""
    expect(output.locator(".gpulab")).to_have_count(1)
    if trusted:  # JupyterLab takes drawings out of what it does not trust; the words stay
        expect(output.locator(".gpulab svg").first).to_be_visible()
    expect(output.locator(".gpulab img")).to_have_count(0)
    tables = output.locator(".jp-RenderedHTMLCommon").filter(has=output.page.locator("table"))
    expect(tables.locator("table").first).to_be_visible()
    for text in SHOWN:
        expect(tables).to_contain_text(text)
    expect(output.locator(".gpulab-live, .jupyter-widgets:not(button)")).to_have_count(0)
    expect(output).not_to_contain_text(DEAD)
    expect(output).not_to_contain_text("Traceback")
    [bundle] = output.page.evaluate(REPORT_BUNDLES, TRAINING)
    opening = next(line for line in "".join(bundle["text/plain"]).splitlines() if "quick-start ·" in line)
    assert outcome in opening


def expect_whole_steps_and_nothing_left(notebook: NotebookPage) -> None:
    """The run ended at a step boundary; in the kernel nothing of the live view or the hooks is left."""
    notebook.write(LOOK, LOOK_INSIDE)
    inside = notebook.run_cell(LOOK)
    for line in ("torn steps: 0", "threads: []", "handlers: []", "widgets: 0", "patched: False"):
        expect(inside).to_contain_text(line)


def expect_ink_of_the_theme_and_no_cut_at_420_pixels(notebook: NotebookPage, output: Locator, shots: Path) -> None:
    ink = {}
    for theme in ("dark", "light"):
        set_theme(notebook.page, theme)
        notebook.screenshot(shots / f"report-{theme}.png")
        colour = output.locator(".gpulab").evaluate("(e) => getComputedStyle(e).color")
        ink[theme] = sum(float(x) for x in re.findall(r"[\d.]+", colour)[:3])
    assert ink["light"] < 300 < ink["dark"], "dark ink on light ground, and the other way round"
    wide = notebook.page.viewport_size
    assert wide is not None
    notebook.command("application:toggle-left-area")
    notebook.page.set_viewport_size({"width": 420, "height": 900})
    notebook.page.wait_for_timeout(500)
    output.locator("details").evaluate_all("(all) => all.forEach((d) => { d.open = true; })")
    notebook.screenshot(shots / "report-420.png", output)
    assert output.evaluate(WIDER_THAN_ITS_PLACE) == [], "nothing is cut off at 420 pixels"
    notebook.page.set_viewport_size(wide)


def save(notebook: NotebookPage, path: Path) -> None:
    """Save in the browser, and wait until the report is in the file."""
    notebook.save()
    wait_until(notebook.page, lambda: "gpulab · quick-start · " in path.read_text(), "the report is in the file")


def read_without_kernel(context: BrowserContext, server: LabServer, saved: Path, shot: Path) -> None:
    """The file reaches someone else: no kernel runs it, and the server, which never signed it, does not trust it."""
    received = json.loads(saved.read_text())
    del received["metadata"]["kernelspec"]
    copy = saved.with_name(f"received-{saved.name}")
    copy.write_text(json.dumps(received))
    page = context.new_page()
    page.set_viewport_size({"width": 1280, "height": 2900})
    page.goto(server.url(f"lab/tree/{copy.name}?reset"))
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_role("button", name="No Kernel").click(timeout=PATIENCE_MS)
    expect(dialog).to_have_count(0)
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(TRAINING)
    output = cell.locator(".jp-Cell-outputArea")
    expect_report(output, "stopped", trusted=False)
    assert page.evaluate(TRUSTED_CELLS) == 0
    assert page.evaluate(KERNEL) == "none"
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust'); }")
    dialog.get_by_role("button", name="Trust").click()
    expect_report(output, "stopped")
    expect(output).to_contain_text("%gpulab panel")  # what the button did: it would be dead here
    expect(output.get_by_role("button")).to_have_count(0)
    for theme in ("light", "dark"):
        set_theme(page, theme)
        cell.screenshot(path=shot.with_name(f"{shot.name}-received-{theme}.png"))
    page.close()


def set_theme(page: Page, theme: str) -> None:
    page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", THEMES[theme])
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", str(theme == "light").lower())
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)  # covers the page for a moment
