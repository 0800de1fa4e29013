"""Every view of a run against made-up runs with known figures: what is shown, what is escaped, what adds up."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import unicodedata
import warnings
from html.parser import HTMLParser

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backend_bases import RendererBase
from matplotlib.cbook import is_math_text
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from msgspec.structs import asdict, replace

from gpulab import formatting
from gpulab.analysis import breakdown as accounting
from gpulab.analysis.facts import facts
from gpulab.analysis.operators import CostRow
from gpulab.run import Change, Missing, Samples, Series, Steps
from gpulab.views import curves, drawing, wording
from gpulab.views.report import device_curves, figure, sections, span_kinds, step_bars, step_zoom, timeline_page
from gpulab.views.report.report import Report
from gpulab.views.report.sections import _costliest
from gpulab.views.report.span_kinds import KINDS
from tests.support import synthetic
from tests.support.synthetic import HOSTILE, MS, Case

CASES = synthetic.cases()
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def report(case: Case, unsaved: str = "") -> Report:
    return Report(case.facts, case.diagnosis, unsaved)


_PAGES: dict[str, str] = {}


def page_of(case: Case) -> str:
    """The page of a small case without its timeline (test_timeline_page.py reads that), drawn once for all tests."""
    return _PAGES.get(case.run.id) or _PAGES.setdefault(case.run.id, _without_timeline(report(case).html()))


def _without_timeline(page: str) -> str:
    page = re.sub(r'<section class="gpulab-timeline">.*?</section>', "", page, flags=re.DOTALL)
    return page.replace(f"; script-src {timeline_page.script_policy()}", "")


class _Reader(HTMLParser):
    """Collects tags, attributes and the text of a page, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def controls(text: str) -> set[str]:
    return {c for c in text if c != "\n" and (unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co"))}


# Words and figures


def test_every_part_of_the_breakdown_has_words_and_colour() -> None:
    assert set(wording.PARTS) == set(accounting.PARTS)
    parts = wording.PARTS.values()
    assert len({p.colour for p in parts}) == len({p.label for p in parts}) == len(parts)
    assert all(p.meaning and p.meaning_on("cpu") for p in parts)


def test_readings_follow_the_unit_in_their_name() -> None:
    assert wording.quantity(0.31, "sm_active_fraction", "fraction") == "31 %"
    assert wording.quantity(61, "gpu_utilization_pct", "%") == "61 %"
    assert wording.quantity(2**31, "rss_bytes", "bytes") == "2.00 GiB"
    assert wording.quantity(310, "power_w", "W") == "310 W"
    assert wording.quantity(1.25, "process_count", "processes") == "1.25"
    assert wording.quantity(float("nan"), "process_count", "processes") == "not measurable"
    assert wording.quantity(float("nan"), "power_w", "W") == "not measurable"


def test_kernel_names_lose_only_what_all_of_them_repeat() -> None:
    kernel = "void at::native::(anonymous namespace)::sum_kernel<float>(float*)"
    assert wording.operator_name(kernel) == "sum_kernel<float>(float*)"
    assert wording.short_name(kernel) == "sum_kernel"
    assert wording.short_name("aten::conv2d") == "conv2d"
    assert wording.short_name("Optimizer.step#Adam.step") == "Optimizer.step"
    assert wording.plain("a\x1b[0m\n\u202eb\ud800 é") == "a\\x1b[0m\\n\\u202eb\\ud800 é"


# Text


@EVERY_CASE
@pytest.mark.parametrize("width", [None, 60, 77, 100])
def test_text_keeps_to_its_width_and_says_the_headline(case: Case, width: int | None) -> None:
    text = report(case).text(width, full=True)
    assert max(map(len, text.splitlines())) <= (width or 100)
    assert not controls(text)
    squeezed = "".join(text.split())
    assert "".join(wording.plain(case.headline.sentence).split()) in squeezed
    assert "".join(wording.plain(case.headline.evidence).split()) in squeezed


def test_text_shows_both_step_times_and_why_steps_were_left_out() -> None:
    case = CASES["cpu"]
    text = report(case).text(full=True)
    assert case.facts.step_us is not None and case.facts.traced_step_us is not None
    without = next(line for line in text.splitlines() if "without the profiler" in line)
    assert formatting.duration(case.facts.step_us.median) in without and without.endswith(
        f" {case.facts.step_us.count}"
    )
    assert formatting.duration(case.facts.traced_step_us.median) in text
    assert "10 steps (5 ran with the profiler; 2 the profiler started" in text and "3 warm-up" in text
    assert "gpulab report 20260801-101500-a1b2" in text


def test_parts_are_shown_by_share_without_zeros() -> None:
    text = report(CASES["cpu"]).text(full=True)
    table = text[text.index("WHERE THE STEP'S TIME GOES") : text.index("COSTLIEST OPERATORS")]
    assert table.index("waiting for the DataLoader") < table.index("computing") < table.index("unknown")
    assert "communicating" not in table and "copying" not in table
    bars = [line.count("█") for line in table.splitlines() if "█" in line]
    assert bars[0] == 9 and bars[1] == 4  # 60 % and 30 % of 16 characters, whole blocks


def test_unknown_time_of_any_length_is_shown() -> None:
    case = CASES["cpu"]
    assert case.facts.breakdown is not None
    share = {**dict.fromkeys(case.facts.breakdown.share, 0.0), "compute": 1 - 1e-6, "unknown": 1e-6}
    changed = replace(case.facts.breakdown, share=share)
    text = Report(replace(case.facts, breakdown=changed), case.diagnosis).text(full=True)
    assert re.search(r"unknown\s+▏\s+< 0\.1 %", text)


def test_why_a_change_had_no_effect_is_said_to_its_end() -> None:
    why = "its dataset was defined in this notebook, where workers started by spawn cannot find it; write it to a file"
    case = CASES["cpu"]
    run = replace(case.run, changes=(Change("workers", "2", "0", "DataLoader option", "no effect", why),))
    text = Report(replace(case.facts, run=run), case.diagnosis).text(full=True)
    assert f"NO EFFECT: {why}" in " ".join(text[text.index("CHANGED FOR") :].split("\n\n")[0].split()[-60:])


def test_what_could_not_be_measured_is_said_and_never_a_zero() -> None:
    text = " ".join(report(CASES["no_step"]).text(full=True).split())
    assert "Not measurable: another torch.profiler is active in this process." in text
    assert "accounted as one whole" in text and "ended by an exception (ValueError: a message" in text
    assert re.search(r"the whole cell, without the profiler\s+500 ms", text) and "0 ms" not in text.replace(
        "500 ms", ""
    )
    assert "(from 240 ms into the" in report(CASES["gpu"]).text(full=True)


def test_an_unsaved_run_does_not_promise_to_open_again() -> None:
    text = report(CASES["cpu"], "No space left on device: free some, then run again.").text(full=True)
    assert "Not saved: No space left on device" in text and "Open it again" not in text


# HTML


@EVERY_CASE
def test_the_page_stands_alone_and_is_well_formed(case: Case) -> None:
    page = page_of(case)
    reader = _Reader(page)
    assert not reader.open, f"left open: {reader.open}"
    assert {"script", "img", "link", "iframe", "object"}.isdisjoint(reader.tags)
    assert not {"src", "href"} & {name for name, _ in reader.attributes}
    assert "//" not in page, "an address of something else"
    assert ("charset", "utf-8") in reader.attributes
    assert not controls(page)


@EVERY_CASE
def test_page_and_fragment_say_what_the_text_says(case: Case) -> None:
    """A name too long for its column is cut, and whole in its cell's hint."""
    for markup in (page_of(case), report(case).fragment()):
        reader = _Reader(markup)
        seen = "".join(reader.text.split())
        hints = {value for name, value in reader.attributes if name == "title"}
        for section in sections.sections(case.facts):
            for text in (section.title, *section.lines):
                assert "".join(text.split()) in seen
            for row in section.rows:
                assert all("".join(c.split()) in seen or (row.full or c) in hints for c in row.cells)


@EVERY_CASE
def test_a_notebook_keeps_every_tag_of_the_fragment(case: Case) -> None:
    reader = _Reader(report(case).fragment())
    assert not reader.open
    kept = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "p", "b", "a", "details", "summary"}
    assert set(reader.tags) - kept <= {"style", "svg", "path"}, "it is whole without these"
    text = re.sub(r"<(svg|style).*?</\1>", "", report(case).fragment(), flags=re.DOTALL)
    assert {name for name, _ in _Reader(text).attributes} <= {"style", "title", "class", "data-title", "href", "target"}
    fixed = [v for n, v in reader.attributes if n == "style" and v and re.search(r"(?<!-)color:(?!transparent)", v)]
    assert not fixed, "a fixed text colour cannot be read in both themes"


def test_hostile_names_are_text_in_every_view() -> None:
    shown = report(CASES["hostile"])
    for markup in (page_of(CASES["hostile"]), shown.fragment()):
        assert "<script" not in markup
        reader = _Reader(markup)
        assert wording.plain(HOSTILE) in reader.text
        assert {name for name, _ in reader.attributes} <= {
            "style", "title", "data-title", "class", "charset", "name", "content", "http-equiv", "lang", "href",
            "target", "viewbox", "preserveaspectratio", "fill", "stroke", "stroke-width", "vector-effect", "d",
        }  # fmt: skip
    assert not controls(json.dumps(shown.json()))


# JSON

CONTRACT = {
    "schema", "source", "device", "ranks", "integrity", "window_us", "busy_fraction", "kernel_busy_fraction", "steps",
    "data_wait_us", "tensor_core_fraction", "memory", "kernels", "operators",
}  # fmt: skip


@EVERY_CASE
def test_json_keeps_the_contract(case: Case) -> None:
    data = report(case).json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert set(data) >= CONTRACT and data["schema"] == 2
    for step in data["steps"] or ():  # type: ignore[attr-defined]
        assert tuple(step["parts_us"]) == accounting.PARTS
        assert sum(step["parts_us"].values()) == pytest.approx(step["wall_us"], abs=1e-3)


def test_json_has_null_for_what_is_not_measurable() -> None:
    empty, full = report(CASES["no_step"]).json(), report(CASES["gpu"]).json()
    for key in ("steps", "window_us", "busy_fraction", "data_wait_us", "step_us", "samples_per_s", "operators"):
        assert empty[key] is None
    facts_ = CASES["gpu"].facts
    assert facts_.step_us is not None and facts_.breakdown is not None
    assert full["step_us"] == asdict(facts_.step_us)
    assert [s["number"] for s in full["steps"]] == [s.number for s in facts_.breakdown.steps]  # type: ignore[attr-defined]
    exposed = sum(s.parts_ns["data_wait"] for s in facts_.breakdown.steps) / 1e3
    traced = np.isin(facts_.run.steps.number, facts_.run.traced_numbers)
    assert full["data_wait_us"] == {"waited": facts_.run.steps.data_wait_ns[traced].sum() / 1e3, "exposed": exposed}


def test_json_holds_no_number_that_json_cannot() -> None:
    case = CASES["gpu"]
    curve = replace(case.facts.curves[0], mean=float("nan"), maximum=float("inf"))
    data = Report(replace(case.facts, curves=(curve,)), case.diagnosis).json()
    json.dumps(data, allow_nan=False)
    assert data["curves"][0]["mean"] is None  # type: ignore[index]


# The picture


def png_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@EVERY_CASE
def test_the_picture_is_drawn_without_a_warning(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        width, height = png_size(report(case).png())
    assert width == 1100 and 300 <= height <= 880


def full_case() -> Case:
    """As much as a picture can hold: every part, every curve, each with the longest of its labels."""
    case = CASES["gpu"]
    account, curve = case.facts.breakdown, case.run.samples.series[0]
    assert account is not None
    curves = [
        replace(curve, name=f"{label}_{unit}", label=label, source=source)
        for label, source, unit in (
            ("GPU utilization", "NVML", "pct"),
            ("SM active", "NVML GPM", "pct"),
            ("SM occupancy", "NVML GPM", "pct"),
            ("tensor active", "NVML GPM", "pct"),
            ("DRAM active", "NVML GPM", "pct"),
            ("CPU (100 % = 256 usable cores)", "psutil", "pct"),
            ("GPU memory used (all processes)", "NVML", "bytes"),
            ("memory of the process tree", "psutil", "bytes"),
        )
    ]
    run = replace(case.run, samples=Samples(tuple(curves)))
    account = replace(account, share=dict.fromkeys(account.share, 1 / len(account.share)))
    return replace(case, run=run, facts=replace(case.facts, run=run, breakdown=account))


@pytest.mark.parametrize(
    "case", [*CASES.values(), full_case(), synthetic.long_case(2_000)], ids=[*CASES, "full", "long"]
)
def test_no_text_in_the_picture_is_cut_off_small_or_over_another(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes: list[tuple[str, Bbox, float]] = []
    draw = Text.draw

    def noted(text: Text, *args: RendererBase) -> None:
        if text.get_visible() and text.get_text().strip():
            boxes.append((text.get_text(), text.get_window_extent(), float(text.get_fontsize())))
        draw(text, *args)

    monkeypatch.setattr(Text, "draw", noted)
    sheet = Bbox.from_bounds(0, 0, *png_size(report(case).png())).padded(-5)
    assert len(boxes) > 10
    for text, box, points in boxes:
        assert sheet.x0 <= box.x0 and box.x1 <= sheet.x1 and sheet.y0 <= box.y0 and box.y1 <= sheet.y1, text
        assert points >= 8.5, f"{text}: {points} points"
    for i, (text, box, _) in enumerate(boxes):
        over = [other for other, its, _ in boxes[:i] if box.padded(-1).overlaps(its.padded(-1))]
        assert not over, f"{text!r} over {over}"


def test_the_users_matplotlib_is_neither_used_nor_changed() -> None:
    case = CASES["hostile"]
    usual = report(case).png()
    with mpl.rc_context({"text.usetex": True, "font.size": 40, "savefig.dpi": 10, "axes.facecolor": "red"}):
        before = dict(mpl.rcParams)
        assert report(case).png() == usual
        assert dict(mpl.rcParams) == before


def test_a_first_screen_never_imports_matplotlib() -> None:
    program = (
        "import sys; from tests.support import synthetic; from gpulab.views.report.report import Report;"
        "c = synthetic.cpu_case();"
        "assert not {'matplotlib', 'torch', 'IPython'} & set(sys.modules);"
        "Report(c.facts, c.diagnosis).bundle(); assert 'matplotlib' not in sys.modules"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r};"
    subprocess.run([sys.executable, "-c", path + program], check=True)


def test_a_notebooks_output_is_html_and_text_without_a_drawing() -> None:
    """Nobody who waits for the first screen waits for matplotlib."""
    shown = report(CASES["tiny"])
    assert shown.bundle() == {"text/html": shown.fragment(), "text/plain": shown.text()}


def test_dollar_signs_and_strange_glyphs_are_drawn_as_text() -> None:
    drawn = drawing.ink(HOSTILE)
    assert not is_math_text(drawn)
    assert "$" in drawn and "\u65e5" not in drawn and not controls(drawn)


def test_bars_are_means_and_profiled_steps_stand_apart() -> None:
    case = synthetic.long_case(4_000)
    steps, found = case.run.steps, step_bars.bars(case.facts)
    assert len(found.left_s) <= step_bars.MOST_BARS + 10
    covered = np.zeros(len(steps), bool)
    for i, (left, right) in enumerate(zip(found.left_s * 1e9, found.right_s * 1e9, strict=True)):
        mine = (steps.start_ns > left - 1) & (steps.end_ns < right + 1)
        assert mine.any() and mine.sum() <= found.per_bar
        assert found.height_ms[i] == pytest.approx(steps.wall_ns[mine].mean() / MS)
        assert set(np.isin(steps.number[mine], case.run.traced_numbers)) == {bool(found.profiled[i])}
        covered |= mine
    assert covered.all()
    assert (found.right_s - found.left_s).max() < 30, "a bar reaches over the pause between the epochs"


def test_a_few_steps_have_one_bar_each_with_every_part() -> None:
    case = CASES["gpu"]
    found = step_bars.bars(case.facts)
    assert found.per_bar == 1 and len(found.left_s) == len(case.run.steps)
    assert case.facts.breakdown is not None
    first = case.facts.breakdown.steps[0]
    row = int(np.flatnonzero(found.profiled)[0])
    for part, ns in first.parts_ns.items():
        assert found.parts_ms[part][row] == pytest.approx(ns / MS)
    assert found.parts_ms["compute"][~found.profiled].sum() == 0, "an unprofiled step knows no compute"


def test_a_meter_that_pauses_draws_no_line_over_the_hole() -> None:
    t = np.concatenate([np.arange(10), np.arange(100, 110)]) * 100 * MS
    series = Series("cpu_pct", "%", "CPU", "psutil", t, np.arange(20.0))
    at, _, mean, _ = curves.at_most(series, 350)
    assert np.isnan(mean).sum() == 1 and np.isfinite(at).all()
    assert mean[~np.isnan(mean)].tolist() == np.arange(20.0).tolist()


def test_many_readings_are_drawn_as_mean_and_range() -> None:
    value = np.random.default_rng(1).normal(50, 10, 10_000)
    series = Series("cpu_pct", "%", "CPU", "psutil", np.arange(10_000) * MS, value)
    at, low, mean, high = curves.at_most(series, 350)
    assert len(at) <= 350 and low.min() == value.min() and high.max() == value.max()
    groups = np.split(value, range(29, 10_000, 29))
    assert mean.tolist() == pytest.approx([g.mean() for g in groups])


def test_narrow_spans_are_drawn_as_high_as_the_time_they_cover() -> None:
    rng = np.random.default_rng(2)
    left = rng.integers(0, 900, 200)
    right = left + rng.integers(0, 60, 200)
    edges = np.arange(0, 1001, 50)
    dumb = [
        sum(1 for a, b in zip(left, right, strict=True) for t in range(a, b) if lo <= t < lo + 50) for lo in edges[:-1]
    ]
    assert step_zoom.coverage(left.astype(float), right.astype(float), edges.astype(float)).tolist() == dumb


def test_nesting_counts_the_enclosing_spans() -> None:
    rng = np.random.default_rng(3)
    spans = sorted(_nested(rng, 0, 1_000_000, 6), key=lambda s: (s[0], -s[1]))
    start, end = np.array([s[0] for s in spans]), np.array([s[1] for s in spans])
    dumb = [sum(a <= s and e <= b and (a, b) != (s, e) for a, b in spans) for s, e in spans]
    assert span_kinds.nesting(start, end).tolist() == dumb


def _nested(rng: np.random.Generator, start: int, end: int, depth: int) -> list[tuple[int, int]]:
    if depth == 0 or end - start < 20:
        return []
    cuts = np.unique(rng.integers(start + 1, end, 6)).tolist()
    inside = [(a, b) for a, b in zip(cuts[:-1:2], cuts[1::2], strict=False)]
    return inside + [s for a, b in inside for s in _nested(rng, a, b, depth - 1)]


def test_the_zoom_shows_the_median_step_host_above_device() -> None:
    case = CASES["gpu"]
    assert case.facts.breakdown is not None and case.run.timeline is not None
    zoom = step_zoom.Zoom.into(case.run.timeline, case.facts.breakdown, "cuda")
    assert zoom.step.number == case.facts.breakdown.median_step
    assert [t.lane.kind for t in zoom.tracks] == ["thread", "thread", "stream", "stream"]
    assert zoom.tracks[0].training and zoom.tracks[0].rows >= 2
    waiting = zoom.tracks[0].kind == [kind.label for kind in KINDS].index("waiting for the DataLoader")
    drawn = (zoom.tracks[0].end_ns - zoom.tracks[0].start_ns)[waiting].sum()
    row = int(np.flatnonzero(case.run.steps.number == zoom.step.number)[0])
    assert drawn == pytest.approx(case.run.steps.data_wait_ns[row], abs=2)


def test_a_hundred_thousand_spans_are_drawn_with_few_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    case, drawn = synthetic.dense_case(100_000), 0
    real = drawing.rectangles

    def counted(axes: object, left: np.ndarray, *rest: object, **style: object) -> None:
        nonlocal drawn
        drawn += len(left)
        real(axes, left, *rest, **style)  # type: ignore[arg-type]

    monkeypatch.setattr(step_zoom, "rectangles", counted)
    png_size(figure.draw(case.facts, case.headline))
    assert 100 < drawn < 10_000


# Whole cells and real facts


def test_a_window_without_a_step_is_shown_as_one_and_labelled_so() -> None:
    case = CASES["cpu"]
    run = replace(case.run, steps=Steps.empty(), traced_numbers=(), step_source="whole cell")
    shown = Report(facts(run), case.diagnosis)
    assert shown.facts.breakdown is not None and shown.facts.breakdown.whole_window
    text = shown.text(full=True)
    assert "stands as one" in text and "WHERE THE TIME GOES" in text and "no step found" in text
    assert shown.json()["data_wait_us"]["waited"] is None  # type: ignore[index]
    png_size(shown.png())


def test_a_window_without_a_whole_step_marks_no_step() -> None:
    case = CASES["cpu"]
    shown = facts(replace(case.run, traced_numbers=()))
    assert shown.breakdown is not None and shown.breakdown.whole_window
    assert not step_bars.bars(shown).profiled.any()
    png_size(figure.draw(shown, case.headline))


@EVERY_CASE
def test_gpulabs_own_facts_about_the_same_runs_can_be_shown(case: Case) -> None:
    own = facts(case.run)
    assert own.step_us == case.facts.step_us and own.selection.dropped == case.facts.selection.dropped
    shown = Report(own, case.diagnosis)
    assert shown.text(full=True) and shown.fragment() and json.dumps(shown.json(), allow_nan=False)
    png_size(shown.png())


def test_the_reason_of_a_missing_curve_stands_in_the_picture() -> None:
    case = CASES["no_trace"]
    assert (
        device_curves.why_none(case.facts) == "No curve of the device was measured: the sampling process did not start."
    )
    without = replace(case.facts, run=replace(case.run, missing=(Missing("x", "y"),)))
    assert device_curves.why_none(without) == "No curve of the device was measured."


def test_waiting_for_the_loader_is_no_costliest_operator() -> None:
    loader = CostRow("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1.0, 900.0, 900.0, 0.9)
    product = CostRow("aten::addmm", 1.0, 100.0, 100.0, 0.1)
    section, alone = _costliest("Costliest operators", "", [loader, product]), _costliest("x", "", [loader])
    assert section is not None and section.result == "10 % of the profiled time in addmm" and len(section.rows) == 2
    assert alone is not None and alone.result == ""
