"""Takes the README's pictures from real runs: `python -m tests.browser.take_readme_picture [FOLDER] [memory]`.

Runs the README's own cells in JupyterLab and cuts out of the page: the profiled cell while it runs (live.png), the
comparison with two workers (comparison.png), and the bench with four more settings (bench.png); then a cell that dies
of memory, and the click that makes it fit (memory.png, alone with the word `memory`). Take them on a quiet machine and
look at them before they are committed.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import FloatRect, Locator, ViewportSize, expect, sync_playwright

from tests.browser import test_memory_in_lab as in_lab
from tests.browser.jupyterlab_page import PATIENCE_MS, LabServer, NotebookPage, open_chromium
from tests.browser.test_bench_in_lab import toggle
from tests.support.paths import ROOT
from tests.support.readme import cells_of_the_readme

TARGET = ROOT / "docs" / "images"
SETUP, TRAINING, COMPARISON = range(3)
WINDOW: ViewportSize = {
    "width": 1292,
    "height": 8000,
}  # the cell is then about 1200 wide, and nothing has to be scrolled
MARGIN_PX = 8
BENCH = ({"workers": "2"}, {"workers": "4"}, {"batch_size": "16"}, {"workers": "4", "batch_size": "16"})
LIVE_AFTER_MS = 9_000  # of some 40 s: both plots have curves
WITHOUT_FOLDER = """
(folder) => {
  const texts = document.createTreeWalker(document.querySelector(".jp-Notebook"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll(folder, "");
}
"""  # where this checkout lies is nobody's business
NOTHING_SELECTED = "() => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = 0; }"


def main(folder: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as temporary,
        LabServer(Path(temporary)) as server,
        sync_playwright() as playwright,
    ):
        server.write_notebook("readme.ipynb", cells_of_the_readme(), "python3")
        browser = open_chromium(playwright)
        notebook = NotebookPage(browser.new_page(viewport=WINDOW), server, "readme.ipynb")
        notebook.set_theme("light")
        notebook.command("application:toggle-left-area")
        notebook.page.wait_for_timeout(5000)  # the editor's own start must not disturb what is measured
        notebook.run_cell(SETUP)
        notebook.start_cell(TRAINING)
        notebook.page.wait_for_timeout(LIVE_AFTER_MS)
        _take(notebook, folder / "live.png", _whole(notebook.cell(TRAINING)))
        notebook.wait_finished(TRAINING)
        expect(notebook.run_cell(COMPARISON).locator(".gpulab").last).to_be_visible(timeout=PATIENCE_MS)
        _take(notebook, folder / "comparison.png", _with_report(notebook.cell(COMPARISON)))
        notebook.write(COMPARISON, "%gpulab panel")
        bench = notebook.run_cell(COMPARISON).locator(".gp-bench:not(.gp-static)")
        expect(bench.locator(".gp-expected").first).to_be_visible()
        for settings in BENCH:
            _measure(notebook, bench, settings)
        _take(notebook, folder / "bench.png", _down_to(bench, bench.locator(".gp-table")))
        browser.close()


def memory(folder: Path) -> None:
    """The post-mortem of a cell above the proof of what makes it fit, as one picture."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        LabServer(Path(temporary)) as server,
        sync_playwright() as playwright,
    ):
        server.write_notebook("memory.ipynb", [in_lab.SETUP, in_lab.WARM, in_lab.LIMIT, in_lab.DEAD], "python3")
        browser = open_chromium(playwright)
        notebook = NotebookPage(browser.new_page(viewport=WINDOW), server, "memory.ipynb")
        notebook.set_theme("light")
        notebook.command("application:toggle-left-area")
        for index in range(4):
            notebook.run_cell(index)
        output = notebook.output(3)
        parts = [_between(output.locator(".gpulab").first, output.locator("details", has_text="Step time").first)]
        pictures = [notebook.page.screenshot(clip=part) for part in parts]
        output.get_by_role("button", name="Try checkpointing=on").click()
        proof = output.locator(".gpulab", has_text="checkpointing=on with")
        expect(proof).to_be_visible(timeout=in_lab.MINUTES)
        pictures.append(notebook.page.screenshot(clip=_between(proof, proof.locator("details").first)))
        browser.close()
    images = [Image.open(io.BytesIO(picture)) for picture in pictures]
    whole = Image.new("RGB", (max(i.width for i in images), sum(i.height for i in images)), "white")
    for i, image in enumerate(images):
        whole.paste(image, (0, sum(before.height for before in images[:i])))
    whole.save(folder / "memory.png", optimize=True)


def _between(first: Locator, following: Locator) -> FloatRect:
    """From the top of the one to the top of the other, as wide as the first."""
    top, end = first.bounding_box(), following.bounding_box()
    assert top is not None and end is not None
    return {**top, "height": end["y"] - top["y"]}


def _measure(notebook: NotebookPage, bench: Locator, settings: dict[str, str]) -> None:
    """One row, as a user makes it."""
    reset = bench.get_by_role("button", name="Reset", exact=True)
    if reset.is_enabled():
        reset.click()
    for name, value in settings.items():
        toggle(bench, name, value)
    bench.get_by_role("button", name="Run", exact=True).click()
    expect(bench.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    expect(bench.get_by_role("button", name="Run", exact=True)).to_be_enabled(timeout=PATIENCE_MS)


def _take(notebook: NotebookPage, target: Path, clip: FloatRect) -> None:
    notebook.page.evaluate(NOTHING_SELECTED)
    notebook.page.evaluate(WITHOUT_FOLDER, f"{ROOT}/")
    target.parent.mkdir(parents=True, exist_ok=True)
    notebook.page.screenshot(path=target, clip=clip)
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def _whole(cell: Locator) -> FloatRect:
    """The cell and all that it shows."""
    box = cell.bounding_box()
    assert box is not None
    return box


def _down_to(first: Locator, last: Locator) -> FloatRect:
    """From the top of the one to the end of the other."""
    top, end = first.bounding_box(), last.bounding_box()
    assert top is not None and end is not None
    return {**top, "height": end["y"] + end["height"] + MARGIN_PX - top["y"]}


def _with_report(cell: Locator) -> FloatRect:
    """From the cell's first line to the end of the report, its folds closed."""
    whole, report = cell.bounding_box(), cell.locator(".gpulab").last.bounding_box()
    assert whole is not None and report is not None
    bottom = report["y"] + report["height"] + MARGIN_PX
    return {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": bottom - whole["y"]}


if __name__ == "__main__":
    expect.set_options(timeout=PATIENCE_MS)
    words = [word for word in sys.argv[1:] if word != "memory"]
    target = Path(words[0]) if words else TARGET
    if "memory" not in sys.argv[1:]:
        main(target)
    memory(target)
