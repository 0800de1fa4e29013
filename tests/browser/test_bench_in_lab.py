"""The bench in JupyterLab as its user meets it: toggles, rows that grow, two side by side, the edit, and what stays."""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Locator, Route, expect

from tests.browser import test_live_view_in_lab as live
from tests.browser.conftest import OpenNotebook
from tests.browser.jupyterlab_page import NOTEBOOK_7, NotebookPage, wait_until
from tests.browser.test_quick_start import WIDER_THAN_ITS_PLACE
from tests.support.kernel_session import WIDGET_VIEW
from tests.support.paths import ROOT

pytestmark = pytest.mark.browser

OLDER_KERNELS = ["gpulab-ipykernel6", *os.environ.get("GPULAB_TEST_KERNELS", "").split()]
EXPERIMENT_MS = 300_000  # an experiment may take its minute on a slow machine, and its runs with a trace before it

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
from torch import nn
from torch.utils.data import DataLoader
%load_ext gpulab
from slow_disk import SlowDisk
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
IN_NOTEBOOK_7, ON_AN_OLDER_KERNEL = (TRAINING.replace("(100)", f"({epochs})") for epochs in (101, 102))  # own benches
BENCH = "%gpulab panel"
TRY = re.compile(r"^Try workers=\d+$")
OPEN = "Try other settings"
TF32_REFUSED = "TF32 needs an NVIDIA GPU, and this run's device is the CPU"
INTERVAL = re.compile(r"\(.*–.*\)")
PAIRS = re.compile(r"(\d+) pairs?")
ADD_UP = re.compile(r"add up|gain more than expected")
FIRST_FIGURES = re.compile(r"\d× so far, 1 pair")
SAVE_STATE = "@jupyter-widgets/jupyterlab-manager:saveWidgetState"  # a menu's item with a check mark
STATE_TYPE = "application/vnd.jupyter.widget-state+json"
SHARE = Path(sys.prefix) / "share"
HTML_MANAGER = SHARE / "gpulab-html-manager" / "package" / "dist" / "embed-amd.js"
SERVED = {  # all that a page of nbconvert loads, by a part of its address
    "require.js": SHARE / "jupyterhub" / "static" / "components" / "requirejs" / "require.js",
    "@jupyter-widgets/html-manager@": HTML_MANAGER,
    "/npm/anywidget@": SHARE / "jupyter" / "nbextensions" / "anywidget" / "index.js",
}
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


def bench_of(output: Locator) -> Locator:
    """The live one: the same as HTML stands before it, hidden."""
    return output.locator(".gp-bench:not(.gp-static)")


def toggle(bench: Locator, name: str, value: str) -> None:
    control = bench.locator(f'[data-toggle="{name}"]').locator("input, select")
    if not control.is_visible():  # those of which nothing is expected are folded
        bench.locator(".gp-more > summary").click()
    if control.evaluate("e => e.tagName") == "SELECT":
        control.select_option(value)
    elif control.get_attribute("type") == "checkbox":
        control.set_checked(value == "on")
    else:
        control.fill(value)
        control.press("Enter")
    expect(bench.locator(f'[data-toggle="{name}"][data-changed]')).to_be_visible()


def rows(bench: Locator) -> Locator:
    return bench.locator(".gp-rows > tbody > tr")


def press(bench: Locator, name: str) -> None:
    bench.get_by_role("button", name=name, exact=True).click()


def start(notebook: NotebookPage, bench: Locator, name: str) -> None:
    press(bench, name)
    expect(stop_button(notebook)).to_be_visible()


def stop_button(notebook: NotebookPage) -> Locator:
    """Wherever it is: in the bench, or over the page."""
    return notebook.page.get_by_role("button", name="Stop", exact=True)


def wait_for_end(notebook: NotebookPage) -> None:
    expect(stop_button(notebook)).to_be_hidden(timeout=EXPERIMENT_MS)


def press_stop(notebook: NotebookPage) -> None:
    stop_button(notebook).click()
    wait_for_end(notebook)


def pairs_of(row: Locator) -> int:
    said = PAIRS.search(row.inner_text())
    return int(said[1]) if said else 0


def stop_after(notebook: NotebookPage, row: Locator, pairs: int) -> None:
    """Once the row has so many; it keeps them."""
    wait_until(notebook.page, lambda: row.count() > 0 and pairs_of(row) >= pairs, f"{pairs} pairs")
    press_stop(notebook)
    assert pairs_of(row) >= pairs


def speeds(bench: Locator) -> list[float]:
    """Of the rows, from top to bottom."""
    return [float(speed) for speed in rows(bench).evaluate_all("all => all.map((row) => row.dataset.bySpeed)")]


def do(row: Locator, name: str) -> None:
    row.locator("summary").click()
    row.get_by_role("button", name=name, exact=True).click()


def expect_nothing_left(notebook: NotebookPage, index: int) -> None:
    left = notebook.run_cell(index)
    for line in ("threads: []", "handlers: []", "widgets: 0", "patched: False", "stdout: OutStream OutStream"):
        expect(left).to_contain_text(line)


@pytest.mark.slow("rows of a bench measured in blocks, a factorial, the first rung of a climb, and a page opened again")
def test_the_bench_grows_and_stays(open_notebook: OpenNotebook, chromium: Browser, shots: Path) -> None:
    notebook = open_notebook([SETUP, TRAINING, BENCH, LEFT_BEHIND])
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    notebook.run_cell(0)
    report = notebook.run_cell(1)
    expect(report.get_by_role("button", name=TRY)).to_be_visible()
    expect(report.get_by_role("button", name=OPEN)).to_be_visible()
    output = notebook.run_cell(2)
    expect(report.get_by_role("button")).to_have_count(0)  # only the latest report has them
    bench = bench_of(output)
    expect(rows(bench)).to_have_count(1)  # the cell as it ran, which is not run again
    expect(rows(bench)).to_contain_text("baseline")
    expect(bench.locator(".gp-expected").first).to_contain_text("expected")
    expect(bench.locator(".gp-fixed")).to_contain_text("not apply here")
    bench.locator(".gp-fixed summary").click()
    expect(bench).to_contain_text(TF32_REFUSED)
    notebook.screenshot(shots / "bench-0-fresh.png", of=output)

    measure(notebook, bench, shots)
    open_two_by_keyboard(notebook, bench, shots)
    change_rows(notebook, bench)
    press(bench, "Apply to the cell")
    expect(bench.locator(".gp-message")).to_contain_text("The cell now has workers=2")
    expect(notebook.cell(1).locator(".jp-InputArea")).to_contain_text("num_workers=2")

    count = rows(bench).count()
    save_with_widget_state(notebook)
    expect_shown_by_the_widgets_html_manager(chromium, notebook.path, count, shots)
    notebook.reload()
    expect(rows(bench)).to_have_count(count)  # the kernel goes on, and so does the widget
    press(bench, "Close")
    expect(bench).to_have_count(0)
    expect(rows(output)).to_have_count(count)  # as HTML
    expect_nothing_left(notebook, 3)

    notebook.run_cell(2)
    expect(rows(bench)).to_have_count(count)
    notebook.save()
    notebook.command("kernelmenu:shutdown")
    notebook.reload(kernel=False)
    expect(rows(output.locator(".gp-static"))).to_have_count(count)
    notebook.page.wait_for_timeout(3000)
    notebook.screenshot(shots / "bench-3-without-kernel.png")
    assert "Error displaying widget" not in notebook.output(2).inner_text()


def measure(notebook: NotebookPage, bench: Locator, shots: Path) -> None:
    """Run, Stop, Decide it, Each, Climb and Run again: a baseline and four rows or more."""
    toggle(bench, "workers", "2")
    start(notebook, bench, "Run")
    row = rows(bench).nth(1)
    expect(row).to_contain_text(FIRST_FIGURES, timeout=EXPERIMENT_MS)
    notebook.cell(0).scroll_into_view_if_needed()
    expect(stop_button(notebook)).to_be_in_viewport()
    notebook.screenshot(shots / "bench-1-running.png")
    expect(bench.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    expect(row).to_contain_text(INTERVAL, timeout=EXPERIMENT_MS)
    wait_for_end(notebook)
    expect(bench.locator(".gp-message")).to_contain_text("workers=2")

    press(bench, "Reset")
    expect(bench.locator("[data-toggle][data-changed]")).to_have_count(0)
    toggle(bench, "fused_optimizer", "on")
    start(notebook, bench, "Run")
    row = rows(bench).nth(2)
    stop_after(notebook, row, pairs=1)
    expect(bench).not_to_contain_text("KeyboardInterrupt")
    before = pairs_of(row)
    row.get_by_role("button", name="Decide it").click()  # so few pairs decide nothing about a loss of no time
    stop_after(notebook, row, pairs=before + 1)

    toggle(bench, "workers", "2")
    start(notebook, bench, "Each by itself and together")
    expect_all_of_it_in_sight(notebook, bench, shots / "bench-2-each")
    together = rows(bench).filter(has_text="workers=2").filter(has_text="fused_optimizer=on")
    stop_after(notebook, together, pairs=2)
    expect(rows(bench)).to_have_count(4)
    expect(bench.locator(".gp-message")).to_contain_text(ADD_UP)

    start(notebook, bench, "Climb")
    expect(rows(bench).nth(4)).to_contain_text("rung 1 of a climb", timeout=EXPERIMENT_MS)
    press_stop(notebook)

    before = pairs_of(row)
    do(row, "Run again")
    expect(row).to_contain_text(FIRST_FIGURES, timeout=EXPERIMENT_MS)  # its earlier pairs are gone
    press_stop(notebook)
    assert pairs_of(row) < before


def expect_all_of_it_in_sight(notebook: NotebookPage, bench: Locator, shot: Path) -> None:
    """Wide and narrow, light and dark, nothing of the bench is outside its box; Stop, if there, is in the window."""
    page = notebook.page
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    running = stop_button(notebook).is_visible()
    for theme, width in itertools.product(("dark", "light"), (1280, 420)):
        notebook.set_theme(theme)
        page.set_viewport_size({"width": width, "height": 1080 if running else 4000})
        expect(bench).to_have_attribute("data-theme", theme)
        page.wait_for_timeout(500)
        for box in (bench, notebook.output(2), page.locator("html"), page.locator("body")):
            cut = box.evaluate(WIDER_THAN_ITS_PLACE)
            assert box.evaluate("e => e.scrollWidth <= e.clientWidth"), f"cut at {width} px: {cut}"
        assert bench.evaluate(WIDER_THAN_ITS_PLACE) == []
        if running:
            expect(stop_button(notebook)).to_be_in_viewport(ratio=1)
        picture = shot.with_name(f"{shot.name}-{theme}-{width}.png")
        notebook.screenshot(picture, of=None if running else notebook.output(2))
    page.set_viewport_size({"width": 1280, "height": 1080})


def open_two_by_keyboard(notebook: NotebookPage, bench: Locator, shots: Path) -> None:
    """Sort by a column; one row's report, then two side by side, without the mouse."""
    keyboard, head = notebook.page.keyboard, bench.locator("th[aria-sort]:has([data-sort=speed])")
    came = speeds(bench)
    head.get_by_role("button").focus()
    for order, sorted_speeds in (("descending", sorted(came)[::-1]), ("ascending", sorted(came)), ("none", came)):
        keyboard.press("Enter")
        expect(head).to_have_attribute("aria-sort", order)
        assert speeds(bench) == sorted_speeds
    assert came != sorted(came)[::-1]
    rows(bench).nth(0).focus()
    keyboard.press("Enter")
    expect(bench.locator(".gp-detail")).to_contain_text("Step breakdown")  # the report of one run
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    expect(bench.locator(".gp-detail")).to_contain_text("Step time over the run")
    expect(bench.locator('tr[aria-selected="true"]')).to_have_count(2)
    expect_all_of_it_in_sight(notebook, bench, shots / "bench-3-two")


def change_rows(notebook: NotebookPage, bench: Locator) -> None:
    do(rows(bench).nth(2), "Rename")
    notebook.page.keyboard.type("another optimizer")
    notebook.page.keyboard.press("Enter")
    expect(rows(bench).nth(2)).to_contain_text("another optimizer")
    do(rows(bench).nth(2), "Pin")
    expect(rows(bench).nth(1)).to_contain_text("another optimizer")
    count = rows(bench).count()
    do(rows(bench).nth(1), "Remove")
    expect(rows(bench)).to_have_count(count - 1)


def save_with_widget_state(notebook: NotebookPage) -> None:
    """With JupyterLab's "Save Widget State Automatically": nbconvert and GitHub's viewer refuse what has no `state`."""
    notebook.command(SAVE_STATE)
    notebook.path.unlink()  # what is there then is what was saved
    notebook.save()
    wait_until(notebook.page, notebook.path.exists, "the notebook is saved")
    notebook.command(SAVE_STATE)
    saved = nbformat.read(notebook.path, 4)
    nbformat.validate(saved)
    state = saved.metadata.widgets[STATE_TYPE]
    assert (state.version_major, type(state.version_minor)) == (2, int)
    shown = [output.get("data", {}) for cell in saved.cells for output in cell.outputs]
    models = {data[WIDGET_VIEW].model_id for data in shown if WIDGET_VIEW in data}
    assert models and models <= state.state.keys()
    for model in state.state.values():
        assert model.keys() >= {"model_name", "model_module", "model_module_version", "state"}


def expect_shown_by_the_widgets_html_manager(chromium: Browser, saved: Path, count: int, shots: Path) -> None:
    """nbviewer, VS Code and Colab are built on it: no kernel, nothing of JupyterLab, and the network is not there."""
    if not HTML_MANAGER.exists():
        pytest.skip("the widgets' HTML manager is not installed; `make test` installs it where Node is")
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url)
        file = next((file for name, file in SERVED.items() if name in route.request.url), None)
        route.fulfill(path=file, content_type="text/javascript") if file else route.abort()

    page = chromium.new_page(viewport={"width": 1280, "height": 1080})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("http*://**/*", answer)
    markup = saved.with_suffix(".html")
    markup.write_text(HTMLExporter().from_filename(str(saved))[0])
    page.goto(markup.as_uri())
    bench = bench_of(page.locator("body")).first
    expect(rows(bench)).to_have_count(count)
    expect(page.locator(".gp-static")).to_be_hidden()
    rows(bench).last.click()
    expect(bench.locator('tr[aria-selected="true"]')).to_have_count(1)
    bench.locator(".gp-primary").click()
    expect(bench.locator(".gp-message")).to_contain_text("No answer from a kernel")
    page.screenshot(path=shots / "bench-4-html-manager.png", full_page=True)
    page.close()
    assert errors == []
    assert [url for url in asked if not any(name in url for name in (*SERVED, "mathjax"))] == [], "those of the page"


@pytest.mark.slow("a notebook opened in Notebook 7, its cell profiled and compared")
def test_the_bench_in_notebook_7(open_notebook: OpenNotebook, shots: Path) -> None:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed; `make test` installs it")
    notebook = open_notebook([SETUP, IN_NOTEBOOK_7, BENCH], app=NOTEBOOK_7)
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    notebook.run_cell(0)
    notebook.run_cell(1)
    bench = bench_of(notebook.run_cell(2))
    toggle(bench, "workers", "2")
    start(notebook, bench, "Run")
    stop_after(notebook, rows(bench).nth(1), pairs=1)
    rows(bench).nth(1).click()
    press(bench, "Apply to the cell")
    expect(bench.locator(".gp-message")).to_contain_text("The cell now has workers=2")
    expect(notebook.cell(1).locator(".jp-InputArea")).to_contain_text("num_workers=2")
    notebook.screenshot(shots / "bench-notebook-7.png")


@pytest.mark.slow("three rows, each stopped in another way, and a kernel that is restarted")
@pytest.mark.parametrize("kernel", OLDER_KERNELS)
def test_live_view_and_bench_stop_on_an_older_kernel(open_notebook: OpenNotebook, kernel: str, shots: Path) -> None:
    live_cells = (live.SETUP, live.PLAY, live.LEFT_BEHIND)
    notebook = open_notebook([*live_cells, SETUP, ON_AN_OLDER_KERNEL, BENCH, LEFT_BEHIND], kernel=kernel)
    notebook.path.with_name("slow_disk.py").write_text(SLOW_DISK)
    shown = notebook.run_cell(0)
    if kernel == "gpulab-ipykernel6":
        expect(shown).to_contain_text("ipykernel 6.31")
    output = live.watch_the_curve_grow(notebook, 1, "device: CPU")
    live.stop(output)
    expect(output.locator("#report")).to_have_text("stopped by the button: True")
    live.expect_nothing_left(notebook, 2)

    notebook.run_cell(3)
    notebook.run_cell(4)
    bench = bench_of(notebook.run_cell(5))

    def run() -> None:
        press(bench, "Run")
        expect(rows(bench).nth(1)).to_contain_text("pair", timeout=EXPERIMENT_MS)

    expect(bench.locator(".gp-expected").first).to_be_visible()
    toggle(bench, "workers", "2")
    run()
    stop_button(notebook).click()
    wait_for_end(notebook)
    expect(bench).to_contain_text("workers=2")
    expect(bench).not_to_contain_text("KeyboardInterrupt")

    run()
    notebook.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:interrupt-kernel'); }")
    wait_for_end(notebook)
    expect(bench).to_contain_text("Interrupted")

    notebook.page.evaluate(WITHOUT_CONTROL)
    run()
    stop_button(notebook).click()
    wait_for_end(notebook)
    expect(bench).to_contain_text(re.compile("Interrupted|workers=2"))
    expect(bench).not_to_contain_text("KeyboardInterrupt")
    press(bench, "Close")
    expect_nothing_left(notebook, 6)

    notebook.run_cell(5)
    notebook.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(bench.locator(".gp-message")).to_contain_text("The kernel was restarted")
    notebook.wait_idle()
    notebook.run_cell(3)
    notebook.run_cell(4)
    notebook.run_cell(5)
    expect(rows(bench)).to_have_count(2)  # they are on disk
