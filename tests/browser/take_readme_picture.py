"""Takes the README's picture from a real run: `python -m tests.browser.take_readme_picture [FILE.png]`.

Runs the quick-start notebook in JupyterLab and cuts the profiled cell and its report out of the page. Take it on a
quiet machine and look at it before it is committed.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import FloatRect, Locator, ViewportSize, expect, sync_playwright

from tests.browser.jupyterlab_page import PATIENCE_MS, LabServer, NotebookPage, open_chromium
from tests.support.paths import ROOT

QUICK_START = ROOT / "notebooks" / "00_quick_start.ipynb"
TARGET = ROOT / "docs" / "images" / "report.png"
LOAD, SETUP, _GUESS, TRAINING = range(4)  # its code cells
WINDOW: ViewportSize = {
    "width": 1292,
    "height": 4000,
}  # the cell is then about 1200 wide, and nothing has to be scrolled
MARGIN_PX = 8
WITHOUT_FOLDER = """
(folder) => {
  const texts = document.createTreeWalker(document.querySelector(".jp-Notebook"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "");
}
"""  # where this checkout lies is nobody's business
NOTHING_SELECTED = "() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }"


def main(target: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        LabServer(Path(folder)) as server,
        sync_playwright() as playwright,
    ):
        shutil.copy(QUICK_START, server.notebooks)
        browser = open_chromium(playwright)
        notebook = NotebookPage(browser.new_page(viewport=WINDOW), server, QUICK_START.name)
        notebook.set_theme("light")
        notebook.command("application:toggle-left-area")
        notebook.page.wait_for_timeout(5000)  # the editor's own start must not disturb what is measured
        for index in (LOAD, SETUP, TRAINING):
            notebook.run_cell(index)
        expect(notebook.output(TRAINING).locator(".gpulab svg").first).to_be_visible(timeout=PATIENCE_MS)
        notebook.page.evaluate(NOTHING_SELECTED)
        notebook.page.evaluate(WITHOUT_FOLDER, f"{ROOT}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        notebook.page.screenshot(path=target, clip=_cut(notebook.cell(TRAINING)))
        browser.close()
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def _cut(cell: Locator) -> FloatRect:
    """From the cell's first line to the end of the report, its folds closed."""
    whole, report = cell.bounding_box(), cell.locator(".gpulab").last.bounding_box()
    assert whole is not None and report is not None
    bottom = report["y"] + report["height"] + MARGIN_PX
    return {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": bottom - whole["y"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else TARGET)
