"""The timeline of the HTML report: what the page holds is the trace, span by span, and nothing in it can act."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.breakdown import PARTS, breakdown, placed
from gpulab.run import Category, Run, Timeline
from gpulab.views import wording
from gpulab.views.page import static
from gpulab.views.report.report import Report
from gpulab.views.report.timeline_page import timeline_section
from tests.support import synthetic
from tests.support.core_readings import with_cores
from tests.support.synthetic import HOSTILE, Case
from tests.support.timeline_block import decoded
from tests.support.timelines import MAIN, STREAM, Span, timeline

SCRIPTS = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)
WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def section(case: Case, **options: int) -> str:
    return timeline_section(case.run, case.facts.breakdown, **options)


def traced(case: Case) -> Timeline:
    assert case.run.timeline is not None
    return case.run.timeline


def bare(spans: Sequence[Span]) -> Run:
    """A run without steps around these spans."""
    return replace(synthetic.no_step_case().run, timeline=timeline(spans))


# What the page holds


@pytest.mark.parametrize("build", [synthetic.cpu_case, synthetic.gpu_case, lambda: synthetic.dense_case(4_000)])
def test_the_page_holds_every_span_but_the_marks_of_steps(build: Callable[[], Case]) -> None:
    case = build()
    t = traced(case)
    head, found, _ = decoded(section(case))
    origin = t.window_ns[0] - head["window"][0]
    wanted = Counter(
        (int(a) - origin, int(a + d) - origin, wording.plain(t.names[n]), Category(c).name.lower())
        for a, d, n, c in zip(t.start_ns, t.duration_ns, t.name_id, t.category, strict=True)
        if not t.names[n].startswith("ProfilerStep#")
    )
    assert Counter((s.start, s.end, s.name, s.kind[1]) for s in found) == wanted
    assert [w - head["window"][0] for w in head["window"]] == [0, t.window_ns[1] - t.window_ns[0]]
    assert head["extent"] >= max(s.end for s in found)


def test_lanes_stand_in_order_and_nested_spans_below() -> None:
    head, found, _ = decoded(section(synthetic.gpu_case()))
    assert [lane["label"] for lane in head["lanes"]] == [
        "training thread", "thread 4720", "GPU 0 stream 7", "GPU 0 stream 14"
    ]  # fmt: skip
    assert [len(lane["rows"]) for lane in head["lanes"]] == [3, 3, 1, 1]
    inner = next(s for s in found if s.name == "aten::cudnn_convolution")
    assert any(s.row == inner.row - 1 and s.start <= inner.start and s.end >= inner.end for s in found)


def test_each_kernel_knows_its_launch() -> None:
    case = synthetic.gpu_case()
    t = traced(case)
    correlation = {int(a): int(c) for a, c, k in zip(t.start_ns, t.correlation, t.category, strict=True) if k == 5}
    calls = {int(c): int(a) for a, c, k in zip(t.start_ns, t.correlation, t.category, strict=True) if k == 3 and c}
    head, found, _ = decoded(section(case))
    origin = t.window_ns[0] - head["window"][0]
    launched = 0
    for span in found:
        if span.kind[1] not in WORK:
            assert span.launch is None
        elif correlation.get(span.start + origin):
            assert span.launch is not None
            assert found[span.launch].start + origin == calls[correlation[span.start + origin]]
            launched += 1
        else:
            assert span.launch is None
    assert launched == 24 * 6 and head["noLaunch"] == "its launch is not in the trace"


def test_far_apart_and_zero_long_spans_keep_their_nanoseconds() -> None:
    late = 3_600 * 10**9 + 7  # more than 32 bits of nanoseconds
    times = {("long", 0, 2**33 + 1), ("instant", late, late), ("short", late, late + 3)}
    spans = [Span(name, Category.CPU_OP, MAIN, start, end - start) for name, start, end in times]
    _, found, _ = decoded(timeline_section(bare(spans), None))
    assert {(s.name, s.start, s.end) for s in found} == times


def test_overlapping_work_of_one_stream_is_stacked() -> None:
    def rows_of(second_start: int) -> int:
        spans = [
            Span("first", Category.KERNEL, STREAM, 0, 10_000),
            Span("second", Category.KERNEL, STREAM, second_start, 10_000),
            Span("a note", Category.GPU_USER_ANNOTATION, STREAM, 0, 30_000),
        ]
        head, _, _ = decoded(timeline_section(bare(spans), None))
        work = [s for lane in head["lanes"] for s in lane["rows"]][1:]
        assert head["overview"] == work, "the overview draws the work, not the annotations"
        return len(work)

    assert rows_of(10_000) == rows_of(9_001) == 1
    assert rows_of(8_000) == 2


def test_python_frames_stand_apart_from_the_calls_they_hold() -> None:
    spans = [Span(f"frame{i}", Category.PYTHON_FUNCTION, MAIN, 0, 100) for i in range(20)]
    spans.append(Span("aten::mm", Category.CPU_OP, MAIN, 10, 20))
    head, found, _ = decoded(timeline_section(bare(spans), None))
    assert [(lane["label"], len(lane["rows"])) for lane in head["lanes"]] == [
        ("training thread", 1), ("training thread, Python", 20)
    ]  # fmt: skip
    assert found[0].name == "aten::mm"


SPAN = st.builds(
    lambda name, start, length: Span(name, Category.CPU_OP, MAIN, start, length),
    st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 30),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(SPAN, max_size=40))
def test_no_two_spans_of_a_level_overlap_and_none_is_lost(drawn: list[Span]) -> None:
    drawn = [*drawn, Span("a", Category.CPU_OP, MAIN, 0, 1)]
    _, found, _ = decoded(timeline_section(bare(drawn), None))
    assert Counter((s.start, s.end, s.name) for s in found) == Counter((s.start, s.end, s.name) for s in drawn)
    for one, other in pairwise(found):
        assert one.row != other.row or other.start >= one.end


# The parts of the steps


@pytest.mark.parametrize("waited", [0.0, 0.4])
@pytest.mark.parametrize("build", [synthetic.cpu_case, synthetic.gpu_case])
def test_the_strip_places_the_account_in_time(build: Callable[[], Case], waited: float) -> None:
    """Waiting for a core is spread over its step, a nanosecond of each piece rounded."""
    run = with_cores(build().run, waited=waited) if waited else build().run
    account = breakdown(run)
    assert account is not None and (account.share["core_wait"] > 0) is (waited > 0)
    page = timeline_section(run, account)
    head, _, pieces = decoded(page)
    assert head["strip"] == {"title": "parts of each step", "inPlace": True}
    assert ("waited for a core is not known" in page) is (waited > 0)
    assert all(a.end <= b.start for a, b in pairwise(pieces))
    steps = {step["number"]: step for step in head["steps"]}
    rounded_ns = len(pieces) + len(PARTS) if waited else 0
    for step in account.steps:
        drawn, placed_ns = steps[str(step.number)], Counter[str]()
        for piece in pieces:
            if drawn["start"] <= piece.start < drawn["end"]:
                placed_ns[piece.kind[0]] += piece.end - piece.start
        assert all(abs(placed_ns[wording.PARTS[part].label] - ns) <= rounded_ns for part, ns in step.parts_ns.items())
        assert drawn["parts"] == [step.parts_ns[part] for part in wording.PARTS]


def test_pieces_are_what_the_first_claim_on_each_moment_says() -> None:
    spans = [
        Span("enumerate(DataLoader)#X.__next__", Category.USER_ANNOTATION, MAIN, 0, 100),
        Span("kernel", Category.KERNEL, STREAM, 40, 20, 1),
        Span("cudaLaunchKernel", Category.CUDA_RUNTIME, MAIN, 30, 5, 1),
        Span("cudaDeviceSynchronize", Category.CUDA_RUNTIME, MAIN, 100, 50),
        Span("Memcpy HtoD", Category.GPU_MEMCPY, STREAM, 110, 10),
    ]
    run = bare(spans)
    account = breakdown(run)
    assert account is not None and run.timeline is not None
    pieces = placed(account)
    assert pieces is not None
    named = [PARTS[p] for p in pieces.part.tolist()]
    assert list(zip(pieces.start_ns.tolist(), pieces.end_ns.tolist(), named, strict=True)) == [
        (0, 40, "data_wait"), (40, 60, "compute"), (60, 110, "unknown"), (110, 120, "memcpy"), (120, 150, "sync_wait"),
    ]  # fmt: skip  # the copy's launch is not in the trace: the gap before it is unknown


def test_a_breakdown_without_idle_causes_is_placed_too() -> None:
    run = synthetic.gpu_case().run
    account = breakdown(run, idle_causes=False)
    assert account is not None
    head, _, pieces = decoded(timeline_section(run, account))
    assert head["strip"]["inPlace"]
    assert {p.kind[0] for p in pieces} <= {wording.PARTS[p].label for p in ("compute", "memcpy", "unknown")}


def test_parts_without_a_place_are_shown_as_shares() -> None:
    case = synthetic.gpu_case()  # its made-up account is not that of its spans
    page = section(case)
    head, _, pieces = decoded(page)
    assert head["strip"] == {"title": "shares of each step", "inPlace": False}
    assert "how much each part took, not when" in page
    step = head["steps"][0]
    mine = [p for p in pieces if step["start"] <= p.start < step["end"]]
    assert mine[0].start == step["start"] and mine[-1].end == step["end"]
    labels = [part.label for part in wording.PARTS.values()]
    assert [p.kind[0] for p in mine] == [label for label, ns in zip(labels, step["parts"], strict=True) if ns]
    assert all(a.end == b.start for a, b in pairwise(mine))


def test_without_steps_the_window_is_one_band() -> None:
    run = bare([Span("aten::mm", Category.CPU_OP, MAIN, 0, 15)])
    head, _, pieces = decoded(timeline_section(run, breakdown(run)))
    assert [(s["label"], s["start"], s["end"]) for s in head["steps"]] == [("whole window", 0, 15)] and pieces
    head, _, pieces = decoded(timeline_section(run, None))
    assert head["steps"] == [] and pieces == []


# Limits


def test_too_many_spans_lose_the_shortest_host_spans() -> None:
    case = synthetic.dense_case(4_000)
    page = section(case, most_spans=1_500)
    head, found, _ = decoded(page)
    assert len(found) == head["spans"] == 1_500
    assert sum(s.kind[1] in WORK for s in found) == 1_000, "all of the GPU's work is kept"
    assert {s.name for s in found if s.kind[1] == "cuda_runtime"} == set(), "the shortest went first"
    assert "Not drawn here: the 2,500 shortest spans, of at most" in page and "all of them on the host" in page
    assert head["noLaunch"] == "its launch is not in this picture"
    page = section(case, most_spans=400)
    assert len(decoded(page)[1]) == 400 and "600 of them GPU work" in page
    page = section(case, most_spans=4_000)
    assert len(decoded(page)[1]) == 4_000 and "Not drawn here" not in page


def test_two_hundred_thousand_spans_fit_into_2500_kb() -> None:
    rng = np.random.default_rng(3)
    t = traced(synthetic.dense_case(200_000))
    duration = np.maximum(1, (t.duration_ns * rng.uniform(0.2, 1.0, len(t))).astype(np.int64))
    moved = replace(t, duration_ns=duration, start_ns=t.start_ns + np.arange(len(t)) % 7)
    order = np.lexsort((-moved.duration_ns, moved.start_ns))
    columns = ("start_ns", "duration_ns", "name_id", "category", "lane_id", "correlation")
    uneven = replace(moved, **{c: getattr(moved, c)[order] for c in columns})
    assert len(timeline_section(replace(synthetic.no_step_case().run, timeline=uneven), None)) < 2_500_000


def test_long_names_are_cut_and_short_ones_are_whole() -> None:
    spans = [Span(name, Category.CPU_OP, MAIN, i, 1) for i, name in enumerate(("x" * 5_000, "void f<int>(int)"))]
    head, _, _ = decoded(timeline_section(bare(spans), None))
    whole, cut = sorted(head["names"])
    assert (len(cut), cut[-1], whole) == (400, "…", "void f<int>(int)")
    assert head["short"][head["names"].index(whole)] == "f"


@pytest.mark.parametrize("build", [synthetic.no_step_case, synthetic.no_trace_case])
def test_without_a_trace_there_is_no_timeline_and_no_script(build: Callable[[], Case]) -> None:
    case = build()
    assert section(case) == ""
    page = Report(case.facts, case.diagnosis).html()
    assert "<script" not in page and "script-src" not in page


# Safety


def test_hostile_names_stay_data() -> None:
    case = synthetic.hostile_case()
    page = Report(case.facts, case.diagnosis).html()
    scripts = SCRIPTS.findall(page)
    assert [attributes for attributes, _ in scripts] == [' type="application/octet-stream" class="tl-data"', ""]
    assert not any("alert(1)" in text for _, text in scripts)
    assert "gpulab-timeline" not in Report(case.facts, case.diagnosis).fragment(), "a notebook has none"
    head, found, _ = decoded(page)
    assert found[0].name.startswith(wording.plain(HOSTILE)) and found[0].lane.startswith(wording.plain(HOSTILE)[:40])
    assert all(text.isprintable() for text in (*head["names"], *(lane["label"] for lane in head["lanes"])))


def test_the_policy_lets_this_script_run_and_no_other() -> None:
    case = synthetic.cpu_case()
    page = Report(case.facts, case.diagnosis).html()
    (_, script) = SCRIPTS.findall(page)[1]
    assert script == static("timeline.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; ") and policy.endswith(f"; script-src 'sha256-{digest}'")


@pytest.mark.parametrize("file", ["timeline.js", "live.js"])
def test_a_script_fetches_nothing_and_writes_no_markup(file: str) -> None:
    script = static(file)
    assert 1_000 < len(script) < 100_000
    for forbidden in (
        "http:", "https:", "import(", "@import", "import {", "fetch(", "XMLHttp", "innerHTML", "outerHTML",
        "insertAdjacent", "document.write", "eval(", "</script",
    ):  # fmt: skip
        assert forbidden not in script, forbidden
