"""Drives JupyterLab and Notebook 7 as a user does: a server on a free port, a notebook in Chromium, cells that run.

Nothing here knows gpulab. Everything the server writes goes into the folder it is given.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Locator, Page, Playwright, expect

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
CHROMIUM_ARGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
PATIENCE_MS = 240_000  # for whatever must come; nothing is asserted about how soon
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},  # the others hide cells scrolled away
    "@jupyterlab/apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}
NUMBERED = re.compile(r"\[\d+\]")
KERNEL_READY = """
async () => {
  const app = window.jupyterapp;
  await app.restored;
  const session = app.shell.currentWidget?.sessionContext;
  if (!session) return false;
  await session.ready;
  const kernel = session.session?.kernel;
  return kernel?.connectionStatus === "connected" && kernel.status === "idle";
}
"""
START_CELL = """
(index) => {
  const app = window.jupyterapp;
  const notebook = app.shell.currentWidget.content;
  notebook.activeCellIndex = notebook.widgets.indexOf(notebook.widgets.filter((c) => c.model.type === "code")[index]);
  app.commands.execute("notebook:run-cell"); // ends when the cell ends: not awaited
}
"""
SET_SOURCE = """
([index, source]) => {
  const cells = window.jupyterapp.shell.currentWidget.content.widgets.map((cell) => cell.model);
  cells.filter((model) => model.type === "code")[index].sharedModel.setSource(source);
}
"""
JUPYTERLAB, NOTEBOOK_7 = "lab/tree", "notebooks"
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}


def open_chromium(playwright: Playwright) -> Browser:
    """Debian's Chromium, or the one named by $CHROMIUM, without a window."""
    return playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_ARGS), timeout=PATIENCE_MS)


class LabServer:
    """A JupyterLab server that serves `folder/notebooks`. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.notebooks = folder / "notebooks"
        self._folder = folder
        self._token = secrets.token_hex(16)
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"

    def __enter__(self) -> LabServer:
        self.notebooks.mkdir(parents=True)
        self._write_settings()
        command = [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
            f"--ServerApp.port={self._port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.root_dir={self.notebooks}", "--LabApp.extension_manager=readonly",
            "--JupyterNotebookApp.expose_app_in_browser=True",
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()  # the server then shuts its kernels down
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _environment(self) -> dict[str, str]:
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        ours = {name: str(self._folder / folder) for name, folder in folders.items()}
        return {**os.environ, **ours, "JUPYTER_TOKEN": self._token}

    def _write_settings(self) -> None:
        for plugin, values in SETTINGS.items():
            path = self._folder / "settings" / f"{plugin}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + PATIENCE_MS / 1e3
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url("api/status"), timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-4000:]}")

    def url(self, path: str) -> str:
        """An address on this server that needs no further login."""
        joiner = "&" if "?" in path else "?"
        return f"http://127.0.0.1:{self._port}/{path}{joiner}token={self._token}"

    def kernels(self) -> set[str]:
        """Names of the kernelspecs the server knows."""
        with urllib.request.urlopen(self.url("api/kernelspecs"), timeout=PATIENCE_MS / 1e3) as answer:
            return set(json.load(answer)["kernelspecs"])

    def write_notebook(self, name: str, cells: Sequence[str], kernel: str) -> Path:
        """A notebook of code cells; it names its kernelspec, so that no dialog asks for one."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in cells],
            metadata={"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}},
        )
        path = self.notebooks / name
        nbformat.write(notebook, path)
        return path


class NotebookPage:
    """One notebook open in JupyterLab; with `NOTEBOOK_7` as its `app`, there."""

    def __init__(self, page: Page, server: LabServer, name: str, app: str = JUPYTERLAB) -> None:
        self.page = page
        self.console: list[str] = []  # errors the page reported
        page.on("console", lambda message: self.console.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.console.append(str(error)))
        self.path = server.notebooks / name
        self._url = server.url(f"{app}/{name}?reset")
        self.open()

    def open(self, kernel: bool = True) -> None:
        """Load the page; `kernel=False` does not wait for one."""
        self.page.goto(self._url)
        expect(self.page.locator(".jp-Notebook .jp-Cell").first).to_be_visible(timeout=PATIENCE_MS)
        if kernel:
            self.page.wait_for_function(KERNEL_READY, timeout=PATIENCE_MS)
            self.wait_idle()

    def reload(self, kernel: bool = True) -> None:
        """Load the page again, as a user does."""
        self.open(kernel)

    def _status(self) -> Locator:
        return self.page.locator(".jp-NotebookPanel:visible .jp-Notebook-ExecutionIndicator")

    def wait_idle(self) -> None:
        """Until the kernel runs nothing."""
        expect(self._status()).to_have_attribute("data-status", "idle", timeout=PATIENCE_MS)

    def running(self, index: int) -> bool:
        """Whether the cell runs now: its prompt has the star. (The kernel's indicator also follows other messages.)"""
        return "*" in self.cell(index).locator(".jp-InputPrompt").inner_text()

    def cell(self, index: int) -> Locator:
        """The cell, its input and output."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(index)

    def output(self, index: int) -> Locator:
        """All that the cell has shown."""
        return self.cell(index).locator(".jp-Cell-outputArea")

    def write(self, index: int, source: str) -> None:
        """What typing it into the cell does."""
        self.page.evaluate(SET_SOURCE, [index, source])

    def start_cell(self, index: int) -> None:
        """Run the cell, and do not wait for its end."""
        self.page.evaluate(START_CELL, index)

    def run_cell(self, index: int) -> Locator:
        """Run the cell to its end; returns its output."""
        self.start_cell(index)
        self.wait_finished(index)
        return self.output(index)

    def wait_finished(self, index: int) -> None:
        """Until the cell has its execution count."""
        prompt = self.cell(index).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(NUMBERED, timeout=PATIENCE_MS)

    def command(self, name: str, **arguments: object) -> None:
        """Execute one of JupyterLab's commands."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])

    def save(self) -> None:
        """Write the notebook to disk, outputs included."""
        self.command("docmanager:save")

    def set_theme(self, theme: str) -> None:
        """ "light" or "dark"."""
        self.command("apputils:change-theme", theme=THEMES[theme])
        light = "true" if theme == "light" else "false"
        expect(self.page.locator("body")).to_have_attribute("data-jp-theme-light", light, timeout=PATIENCE_MS)

    def screenshot(self, path: Path, of: Locator | None = None) -> None:
        """The page, or one element of it, as a PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if of is None:
            self.page.screenshot(path=path)
        else:
            of.scroll_into_view_if_needed()
            of.screenshot(path=path)


def wait_until(page: Page, happened: Callable[[], bool], what: str) -> None:
    """For what Playwright cannot wait for by itself."""
    for _ in range(PATIENCE_MS // 100):
        if happened():
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never happened: {what}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
