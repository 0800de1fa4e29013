"""One JupyterLab server and one Chromium for all browser tests; a fresh page and kernel for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser.jupyterlab_page import CHROMIUM, JUPYTERLAB, PATIENCE_MS, LabServer, NotebookPage, open_chromium

expect.set_options(timeout=PATIENCE_MS)
OpenNotebook = Callable[..., NotebookPage]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"no Chromium at {CHROMIUM}; set CHROMIUM")
    with sync_playwright() as playwright:
        browser = open_chromium(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    with LabServer(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="session")
def lab_context(chromium: Browser) -> Iterator[BrowserContext]:
    """One for all of JupyterLab's pages: it keeps the compiled scripts, half the cost of a page."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1080})
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def open_notebook(
    lab_context: BrowserContext, lab_server: LabServer, request: pytest.FixtureRequest
) -> Iterator[OpenNotebook]:
    """`open_notebook(cells, kernel="python3", app=JUPYTERLAB)` → the notebook, its kernel idle, in the light theme."""
    pages: list[Page] = []

    def opened(cells: Sequence[str], kernel: str = "python3", app: str = JUPYTERLAB) -> NotebookPage:
        if kernel not in lab_server.kernels():
            pytest.skip(f"the kernelspec {kernel} is not installed; `make test` installs it")
        name = f"{request.node.name.replace('[', '-').rstrip(']')}-{len(pages)}.ipynb"
        lab_server.write_notebook(name, cells, kernel)
        pages.append(lab_context.new_page())
        notebook = NotebookPage(pages[-1], lab_server, name, app)
        notebook.set_theme("light")  # the server keeps the last choice
        return notebook

    yield opened
    for page in pages:
        page.evaluate(SHUT_DOWN)
        page.close()


SHUT_DOWN = "() => window.jupyterapp?.serviceManager.sessions.shutdownAll()"


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where screenshots go: the folder $GPULAB_SHOTS, kept, or the test's own."""
    return Path(os.environ.get("GPULAB_SHOTS", tmp_path))
