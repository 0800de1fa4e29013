"""The quick-start notebook as its reader meets it: watch, stop, keep, and read again where no kernel is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.conftest import SHUT_DOWN
from tests.browser.jupyterlab_page import PATIENCE_MS, THEMES, LabServer, NotebookPage
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

QUICK_START = ROOT / "notebooks" / "00_quick_start.ipynb"
KERNELS = ["python3", "gpulab-ipykernel6", *os.environ.get("GPULAB_TEST_KERNELS", "").split()]
LOAD, SETUP, _GUESS, TRAINING, _REVEAL, LOOK = range(6)  # its code cells
AS_WRITTEN, ENDLESS = "in range(2):", "in range(100_000):"  # epochs: only Stop ends the longer training
HEADLINE = re.compile(  # on a busy machine the cores come first
    "of its time waiting for the next batch of data|no processor core was free"
)
SHOWN: list[str | re.Pattern[str]] = [
    HEADLINE,
    "Step time",
    "Where the step's time goes",
    "Costliest operators",
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
SET_SOURCE = """
([index, source]) => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets.map((cell) => cell.model);
  cells.filter((model) => model.type === "code")[index].sharedModel.setSource(source);
}
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

OpenQuickStart = Callable[..., tuple[NotebookPage, Path]]


@pytest.fixture
def open_quick_start(
    chromium: Browser, lab_server: LabServer, request: pytest.FixtureRequest
) -> Iterator[OpenQuickStart]:
    """`open_quick_start(kernel, epochs)` → a copy of the notebook, its first two cells run, and its file."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1080})
    context.set_default_timeout(PATIENCE_MS)

    def opened(kernel: str, epochs: str = AS_WRITTEN) -> tuple[NotebookPage, Path]:
        if kernel not in lab_server.kernels():
            pytest.skip(f"the kernelspec {kernel} is not installed; `make test` installs it")
        path = lab_server.notebooks / f"{request.node.name.replace('[', '-').rstrip(']')}.ipynb"
        notebook = nbformat.read(QUICK_START, as_version=4)
        notebook.metadata.kernelspec = {"name": kernel, "display_name": kernel, "language": "python"}
        training = next(cell for cell in notebook.cells if cell.id == "training")
        assert AS_WRITTEN in training.source
        training.source = training.source.replace(AS_WRITTEN, epochs)
        for cell in notebook.cells:
            if cell.cell_type == "code":  # JupyterLab trusts a reloaded notebook only where all of it ran here
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
        page = NotebookPage(context.new_page(), lab_server, path.name)
        page.run_cell(LOAD)
        page.run_cell(SETUP)
        return page, path

    yield opened
    for page in context.pages:
        page.evaluate(SHUT_DOWN)
    context.close()


@pytest.mark.parametrize("kernel", KERNELS)
def test_watch_stop_keep_and_read_again_without_a_kernel(
    open_quick_start: OpenQuickStart, chromium: Browser, lab_server: LabServer, kernel: str, shots: Path
) -> None:
    notebook, path = open_quick_start(kernel, ENDLESS)
    output = notebook.output(TRAINING)
    notebook.start_cell(TRAINING)
    watch_it_grow(notebook, output, shots / f"quick-start-{kernel}")

    output.get_by_role("button", name="Stop").click()
    notebook.wait_finished(TRAINING)
    expect_report(output, "stopped")
    expect(output).not_to_contain_text("KeyboardInterrupt")
    expect(notebook.run_cell(LOOK)).to_contain_text("quick-start stopped")
    expect_whole_steps_and_nothing_left(notebook)

    save(notebook, path)
    assert "widget-view" not in path.read_text()
    read_without_kernel(chromium, lab_server, path, shots / f"quick-start-{kernel}")

    notebook.reload()  # the same kernel goes on
    expect_report(notebook.output(TRAINING), "stopped")
    set_source(notebook, TRAINING, written(TRAINING))
    expect(notebook.run_cell(TRAINING)).to_contain_text("epoch 1: loss")
    expect_report(notebook.output(TRAINING), "completed")
    set_source(notebook, LOOK, written(LOOK))
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
    for _ in range(PATIENCE_MS // 100):
        if points(live, plot) > more_than:
            return
        live.page.wait_for_timeout(100)
    raise AssertionError(f"{plot}: never more than {more_than} points")


def expect_report(output: Locator, outcome: str, *, trusted: bool = True) -> None:
    """Picture, headline and tables stand in the output; of widgets at most the button that opens the panel."""
    expect(output.locator(".gpulab")).to_have_count(1)
    if trusted:  # JupyterLab takes drawings out of what it does not trust; the words stay
        expect(output.locator(".gpulab svg").first).to_be_visible()
    expect(output.locator(".gpulab img")).to_have_count(0)
    tables = output.locator(".jp-RenderedHTMLCommon").filter(has=output.page.locator("table"))
    expect(tables.locator("table").first).to_be_visible()
    for text in SHOWN:
        expect(tables).to_contain_text(text)
    expect(output.locator(".gpulab-live, .jupyter-widgets:not(button)")).to_have_count(0)
    expect(output).not_to_contain_text("Error displaying widget")
    expect(output).not_to_contain_text("Traceback")
    [bundle] = output.page.evaluate(REPORT_BUNDLES, TRAINING)
    opening = next(line for line in "".join(bundle["text/plain"]).splitlines() if "quick-start ·" in line)
    assert outcome in opening


def expect_whole_steps_and_nothing_left(notebook: NotebookPage) -> None:
    """The run ended at a step boundary; in the kernel nothing of the live view or the hooks is left."""
    set_source(notebook, LOOK, LOOK_INSIDE)
    inside = notebook.run_cell(LOOK)
    for line in ("torn steps: 0", "threads: []", "handlers: []", "widgets: 0", "patched: False"):
        expect(inside).to_contain_text(line)


def save(notebook: NotebookPage, path: Path) -> None:
    """Save in the browser, and wait until the report is in the file."""
    notebook.save()
    for _ in range(PATIENCE_MS // 100):
        if "gpulab · quick-start · " in path.read_text():
            return
        notebook.page.wait_for_timeout(100)
    raise AssertionError("the notebook was not saved with its report")


def read_without_kernel(chromium: Browser, server: LabServer, saved: Path, shot: Path) -> None:
    """The file reaches someone else: no kernel runs it, and the server, which never signed it, does not trust it."""
    received = json.loads(saved.read_text())
    del received["metadata"]["kernelspec"]
    copy = saved.with_name(f"received-{saved.name}")
    copy.write_text(json.dumps(received))
    context = chromium.new_context(viewport={"width": 1280, "height": 2900})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(server.url(f"lab/tree/{copy.name}?reset"))
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_role("button", name="No Kernel").click(timeout=PATIENCE_MS)
    expect(dialog).to_have_count(0)
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(TRAINING)
    expect_report(cell.locator(".jp-Cell-outputArea"), "stopped", trusted=False)
    assert page.evaluate(TRUSTED_CELLS) == 0
    assert page.evaluate(KERNEL) == "none"
    for theme in ("light", "dark"):
        set_theme(page, theme)
        cell.screenshot(path=shot.with_name(f"{shot.name}-received-{theme}.png"))
    context.close()


def set_theme(page: Page, theme: str) -> None:
    page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", THEMES[theme])
    expect(page.locator("body")).to_have_attribute("data-jp-theme-light", str(theme == "light").lower())
    expect(page.locator("#jupyterlab-splash")).to_have_count(0)  # covers the page for a moment


def written(index: int) -> str:
    """A code cell as the notebook in the repository has it."""
    cells: list[str] = [
        cell.source for cell in nbformat.read(QUICK_START, as_version=4).cells if cell.cell_type == "code"
    ]
    return cells[index]


def set_source(notebook: NotebookPage, index: int, source: str) -> None:
    """What typing it into the cell does."""
    notebook.page.evaluate(SET_SOURCE, [index, source])
