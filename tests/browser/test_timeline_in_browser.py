"""The timeline of a report's page in Chromium, opened from disk: it draws, zooms, pans, tells and searches, offline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Dialog, Locator, Page, expect

from gpulab.diagnosis.diagnose import diagnose
from gpulab.views import wording
from gpulab.views.report.report import Report
from tests.browser.jupyterlab_page import PATIENCE_MS, wait_until
from tests.support import synthetic
from tests.support.loops import Machine

pytestmark = pytest.mark.browser

SPANS = 200_000
OpenPage = Callable[..., Page]

# Of each frame of a zoom in and out again: milliseconds spent drawing, and from one frame to the next.
FRAMES = """
async (canvas) => {
  const box = canvas.getBoundingClientRect(), drawing = [], apart = [];
  const wheel = (deltaY) => canvas.dispatchEvent(new WheelEvent("wheel",
    { deltaY, ctrlKey: true, clientX: box.left + 0.6 * box.width, clientY: box.top + 100, cancelable: true }));
  let before = await new Promise(requestAnimationFrame);
  for (const deltaY of [...Array(40).fill(-60), ...Array(40).fill(60)]) {
    wheel(deltaY);
    const now = await new Promise(requestAnimationFrame);
    drawing.push(Number(canvas.dataset.frameMs));
    apart.push(now - before);
    before = now;
  }
  return { drawing: drawing.sort((a, b) => a - b), apart: apart.sort((a, b) => a - b) };
}
"""

# How many pixels of the lanes have a colour of their own, not one of the grounds.
COLOURED = """
(canvas) => {
  const { width, height } = canvas, { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    if (Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 40) count++;
  return count;
}
"""
# Pixels of one row of the picture, by their colour.
COLUMN_COLOURS = """
(canvas) => {
  const ratio = canvas.width / canvas.clientWidth, top = Math.round(77 * ratio), high = Math.round(12 * ratio);
  const left = Math.round(160 * ratio), wide = canvas.width - left;
  const { data } = canvas.getContext("2d").getImageData(left, top, wide, high);
  const counts = {};
  for (let i = 0; i < data.length; i += 4) {
    const key = [data[i], data[i + 1], data[i + 2]].join();
    counts[key] = (counts[key] ?? 0) + 1;
  }
  return counts;
}
"""
CORNER = "(canvas) => [...canvas.getContext('2d').getImageData(1, canvas.height - 2, 1, 1).data].slice(0, 3)"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = synthetic.dense_case(SPANS)
    path = tmp_path_factory.mktemp("timeline") / "report.html"
    path.write_text(Report(case.facts, case.diagnosis).html(), encoding="utf-8")
    return path


def written(folder: Path, machine: Machine) -> Path:
    facts = machine.facts()
    path = folder / "report.html"
    path.write_text(Report(facts, diagnose(facts, predict_cures=False)).html(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def small_page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    machine = Machine()
    for _ in range(3):
        machine.operator("aten::mm", "gemm of mm", 500, 20)
        machine.end_step()
    return written(tmp_path_factory.mktemp("small"), machine)


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """`open_page(path, theme="dark", …)` → the page, ready; afterwards: no error, no request, no dialog."""
    contexts: list[BrowserContext] = []
    trouble: list[str] = []

    def dismissed(dialog: Dialog) -> None:
        trouble.append(dialog.message)
        dialog.dismiss()

    def opened(path: Path, theme: str = "light", wait: str = "[data-state=ready]", **options: Any) -> Page:
        before = options.pop("before", None)
        context = chromium.new_context(
            **{"viewport": {"width": 1280, "height": 1000}, "color_scheme": theme, **options}
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        if before:
            page.add_init_script(before)
        page.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", dismissed)
        page.on("request", lambda r: trouble.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(path.as_uri())
        page.locator(f".gpulab-timeline{wait}").wait_for(timeout=PATIENCE_MS)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []


def canvas_of(page: Page) -> Locator:
    canvas = page.locator(".tl-canvas")
    canvas.scroll_into_view_if_needed()
    return canvas


def view(canvas: Locator) -> tuple[float, float]:
    return float(canvas.get_attribute("data-from") or "nan"), float(canvas.get_attribute("data-to") or "nan")


def changes(canvas: Locator, act: Callable[[], object]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The view before and after something that must change it."""
    before = view(canvas)
    act()
    wait_until(canvas.page, lambda: view(canvas) != before, "the view changes")
    canvas.page.wait_for_timeout(100)  # for the frames still to come
    return before, view(canvas)


def go_back(canvas: Locator, whole: tuple[float, float]) -> None:
    """Nothing selected, and all in view."""
    canvas.press("Escape")
    canvas.page.locator(".tl-whole").click()
    wait_until(canvas.page, lambda: view(canvas) == whole, "the whole is in view")


def place(canvas: Locator, x: float, y: float) -> tuple[float, float]:
    """A point of the page: a share of the canvas' width, pixels from its top, or from its bottom where negative."""
    box = canvas.bounding_box()
    assert box is not None
    return box["x"] + x * box["width"], box["y"] + (y if y >= 0 else box["height"] + y)


def it_draws_zooms_pans_and_tells(canvas: Locator) -> None:
    page, mouse = canvas.page, canvas.page.mouse
    assert canvas.evaluate(COLOURED) > 10_000
    assert sum(canvas.evaluate(CORNER)) > 600, "the ground is light"

    mouse.move(*place(canvas, 0.6, 150))
    page.keyboard.down("Control")
    (left, right), (nearer_left, nearer_right) = changes(canvas, lambda: mouse.wheel(0, -400))
    page.keyboard.up("Control")
    gutter = 150 / canvas.evaluate("(c) => c.clientWidth")
    under_cursor = (0.6 - gutter) / (1 - gutter)
    assert nearer_right - nearer_left < 0.9 * (right - left)
    fixed = nearer_left + under_cursor * (nearer_right - nearer_left)
    assert fixed == pytest.approx(left + under_cursor * (right - left), abs=0.01 * (right - left))

    def drag() -> None:
        mouse.down()
        mouse.move(*place(canvas, 0.4, 150), steps=4)
        mouse.up()

    (left, right), (moved_left, moved_right) = changes(canvas, drag)
    assert moved_left > left and moved_right - moved_left == pytest.approx(right - left)

    page.keyboard.down("Control")
    for _ in range(16):
        mouse.wheel(0, -400)
    page.keyboard.up("Control")
    page.wait_for_timeout(100)
    mouse.move(*place(canvas, 0.41, 108))
    expect(page.locator(".tl-tip")).to_be_visible()
    expect(page.locator(".tl-tip")).to_contain_text("into step")


def a_click_on_a_kernel_shows_its_launch_and_l_goes_there(canvas: Locator) -> None:
    page = canvas.page
    page.mouse.click(*place(canvas, 0.6, -16))
    detail = page.locator(".tl-detail")
    expect(detail).to_contain_text("kernel")
    expect(detail).to_contain_text("launched by cudaLaunchKernel on training thread")
    expect(canvas).not_to_have_attribute("data-selected", "-1")  # it is written with the next frame
    before = canvas.get_attribute("data-selected")
    canvas.press("l")
    expect(detail).to_contain_text("started 1 on the GPU")
    canvas.press("l")
    expect(canvas).to_have_attribute("data-selected", str(before))


def it_works_by_keyboard_alone(canvas: Locator) -> None:
    page = canvas.page
    page.locator(".tl-whole").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "tl-canvas"
    whole = view(canvas)
    _, near = changes(canvas, lambda: page.keyboard.press("+"))
    assert near[1] - near[0] < whole[1] - whole[0]
    _, panned = changes(canvas, lambda: page.keyboard.press("ArrowRight"))
    assert panned[0] > near[0]
    changes(canvas, lambda: page.keyboard.press("0"))
    assert view(canvas) == whole
    page.keyboard.press("Enter")
    detail = page.locator(".tl-detail")
    expect(detail).to_contain_text("aten::op")
    first = canvas.get_attribute("data-selected")
    page.keyboard.press("Shift+ArrowRight")
    expect(canvas).to_have_attribute("data-selected", str(int(first or 0) + 1))
    page.keyboard.press("Shift+ArrowDown")
    expect(detail).to_contain_text("aten::inner")
    page.keyboard.press("Escape")
    expect(detail).to_be_empty()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.className") == "tl-search"


def search_counts_dims_the_rest_and_steps_through_matches(canvas: Locator) -> None:
    page, box = canvas.page, canvas.page.get_by_role("searchbox")
    vivid = canvas.evaluate(COLOURED)
    box.fill("KERNEL3")
    expect(page.locator(".tl-found")).to_contain_text(f"{SPANS // 4 // 25:,} spans, 1 name")
    page.wait_for_timeout(200)
    assert canvas.evaluate(COLOURED) < 0.8 * vivid
    box.press("Enter")
    expect(page.locator(".tl-detail")).to_contain_text("kernel3 ·")
    first = canvas.get_attribute("data-selected")
    expect(page.locator(".tl-found")).to_contain_text(f"1 of {SPANS // 4 // 25:,} spans, 1 name")
    box.press("Enter")
    expect(canvas).not_to_have_attribute("data-selected", str(first))
    expect(page.locator(".tl-found")).to_contain_text(f"2 of {SPANS // 4 // 25:,} spans, 1 name")
    box.press("Shift+Enter")
    expect(canvas).to_have_attribute("data-selected", str(first))
    box.fill("CUDAlaunch")
    expect(page.locator(".tl-found")).to_contain_text(f"{SPANS // 4:,} spans, 1 name")
    box.fill("no such name")
    expect(page.locator(".tl-found")).to_have_text("no span has this in its name")
    box.fill("")


def test_200_000_spans_are_drawn_zoomed_told_and_searched(page_file: Path, open_page: OpenPage, shots: Path) -> None:
    page = open_page(page_file)
    canvas = canvas_of(page)
    whole = view(canvas)
    it_draws_zooms_pans_and_tells(canvas)
    page.locator(".gpulab-timeline").screenshot(path=shots / "timeline-near.png")
    go_back(canvas, whole)
    a_click_on_a_kernel_shows_its_launch_and_l_goes_there(canvas)
    go_back(canvas, whole)
    it_works_by_keyboard_alone(canvas)
    go_back(canvas, whole)
    search_counts_dims_the_rest_and_steps_through_matches(canvas)

    frames = canvas.evaluate(FRAMES)
    for what, ms in frames.items():
        middle, late, last = ms[len(ms) // 2], ms[int(0.95 * len(ms))], ms[-1]
        print(f"{SPANS:,} spans, {what}: median {middle:.1f} ms, 95 % {late:.1f} ms, most {last:.1f} ms")
    print(f"page: {page_file.stat().st_size / 1e6:.2f} MB")
    assert len(frames["drawing"]) == 80 and all(ms > 0 for ms in frames["drawing"])

    page.emulate_media(color_scheme="dark")
    wait_until(page, lambda: sum(canvas.evaluate(CORNER)) < 600, "the ground is dark")
    assert canvas.evaluate(COLOURED) > 10_000
    page.locator(".gpulab-timeline").screenshot(path=shots / "timeline-dark.png")


def test_search_goes_to_kernels_before_operators_and_python(small_page_file: Path, open_page: OpenPage) -> None:
    page = open_page(small_page_file)
    box, detail = page.get_by_role("searchbox"), page.locator(".tl-detail")
    box.fill("mm")
    expect(page.locator(".tl-found")).to_contain_text("6 spans, 2 names")
    for number, name in enumerate(["gemm of mm"] * 3 + ["aten::mm"] * 3, start=1):
        box.press("Enter")
        expect(page.locator(".tl-found")).to_contain_text(f"{number} of 6 spans")
        expect(detail).to_contain_text(name)


def test_the_wheel_scrolls_the_page_without_ctrl(small_page_file: Path, open_page: OpenPage) -> None:
    page = open_page(small_page_file, viewport={"width": 1280, "height": 500})
    canvas = canvas_of(page)
    page.mouse.move(*place(canvas, 0.6, 100))
    before, scrolled = view(canvas), page.evaluate("scrollY")
    page.mouse.wheel(0, -200)
    wait_until(page, lambda: page.evaluate("scrollY") < scrolled, "the page scrolls")
    assert view(canvas) == before


def test_parts_under_a_pixel_are_drawn_by_their_share(open_page: OpenPage, tmp_path: Path) -> None:
    """A part of 1 % must not fill whole pixels: here 300 times 3 ms of computing, of about three pixels, and 30 µs."""
    machine = Machine()
    for _ in range(300):
        machine.operator("aten::mm", "gemm", 3_000, 3_030)
    machine.end_step()
    page = open_page(written(tmp_path, machine))
    counts = canvas_of(page).evaluate(COLUMN_COLOURS)
    compute = tuple(int(wording.PARTS["compute"].colour[i : i + 2], 16) for i in (1, 3, 5))
    near = sum(
        n
        for rgb, n in counts.items()
        if max(abs(int(a) - b) for a, b in zip(rgb.split(","), compute, strict=True)) < 24
    )
    assert near > 0.8 * sum(counts.values()), sorted(counts.items(), key=lambda item: -item[1])[:5]


def test_it_is_sharp_on_dense_screens_and_follows_the_width(small_page_file: Path, open_page: OpenPage) -> None:
    page = open_page(small_page_file, device_scale_factor=2)
    canvas = canvas_of(page)
    assert canvas.evaluate("(c) => [c.width / c.clientWidth, c.height / c.clientHeight]") == [2, 2]
    page.set_viewport_size({"width": 700, "height": 900})
    wait_until(page, lambda: canvas.evaluate("(c) => c.clientWidth < 700"), "the canvas becomes narrower")
    assert canvas.evaluate("(c) => c.clientWidth <= c.parentElement.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"


def test_an_old_browser_is_told_why_there_is_no_timeline(small_page_file: Path, open_page: OpenPage) -> None:
    page = open_page(small_page_file, wait="", before="delete globalThis.DecompressionStream")
    expect(page.locator(".tl-state")).to_contain_text("it has no DecompressionStream")
    expect(page.locator(".tl-canvas")).to_be_hidden()


def test_hostile_names_are_drawn_and_not_run(open_page: OpenPage, tmp_path: Path) -> None:
    case = synthetic.hostile_case()
    path = tmp_path / "hostile.html"
    path.write_text(Report(case.facts, case.diagnosis).html(), encoding="utf-8")
    page = open_page(path)
    canvas = canvas_of(page)
    canvas.press("Enter")
    expect(page.locator(".tl-detail")).to_contain_text("<script>alert(1)</script>")
    assert page.locator(".gpulab-timeline script").count() == 2
