"""Every view of a run against made-up runs with known figures: what is shown, what is escaped, what adds up."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from gpulab.analysis import breakdown as accounting
from gpulab.analysis.facts import facts
from gpulab.analysis.operators import CostRow
from gpulab.formatting import percent
from gpulab.run import Change, Series
from gpulab.views import run_figure, wording
from gpulab.views.report import timeline_page
from gpulab.views.report.report import Report
from gpulab.views.report.sections import _costliest, without_parts
from gpulab.views.run_figure import picture, segments
from tests.support import synthetic
from tests.support.synthetic import MS, Case
from tests.views.every_view import CASES, report

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


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


def test_unknown_time_of_any_length_is_shown() -> None:
    case = CASES["cpu"]
    assert case.facts.breakdown is not None
    share = {**dict.fromkeys(case.facts.breakdown.share, 0.0), "compute": 1 - 1e-6, "unknown": 1e-6}
    changed = replace(case.facts.breakdown, share=share, whole_window=True)
    text = Report(replace(case.facts, breakdown=changed), case.diagnosis).text(full=True)
    assert re.search(r"unknown\s+▏\s+< 0\.1 %", text)


def test_why_a_change_had_no_effect_is_said_to_its_end() -> None:
    why = "its dataset was defined in this notebook, where workers started by spawn cannot find it; write it to a file"
    case = CASES["cpu"]
    run = replace(case.run, changes=(Change("workers", "2", "0", "DataLoader option", "no effect", why),))
    text = Report(replace(case.facts, run=run), case.diagnosis).text(full=True)
    assert f"NO EFFECT: {why}" in " ".join(text[text.index("CHANGED FOR") :].split("\n\n")[0].split()[-60:])


# JSON

CONTRACT = {
    "schema", "source", "device", "ranks", "integrity", "window_us", "busy_fraction", "kernel_busy_fraction", "steps",
    "data_wait_us", "tensor_core_fraction", "memory", "kernels", "operators",
}  # fmt: skip


@EVERY_CASE
def test_json_keeps_the_contract(case: Case) -> None:
    data = report(case).json()
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


def test_a_device_that_was_read_too_shortly_has_no_mean() -> None:
    run = CASES["cpu"].run
    brief = [replace(s, t_ns=s.t_ns[:4], value=s.value[:4]) for s in run.samples.series]
    short = facts(replace(run, samples=replace(run.samples, series=tuple(brief))))
    assert {c.name for c in short.curves} == {s.name for s in brief if not s.name.endswith("_pct")}
    text = Report(short, CASES["cpu"].diagnosis).text()
    assert re.search(r"Device: CPU.*: too short to measure", text) and "on average" not in text
    assert "0 to 100 %" not in picture(short) and "0 to 100 %" in picture(CASES["cpu"].facts)


def test_json_holds_no_number_that_json_cannot() -> None:
    case = CASES["gpu"]
    curve = replace(case.facts.curves[0], mean=float("nan"), maximum=float("inf"))
    data = Report(replace(case.facts, curves=(curve,)), case.diagnosis).json()
    json.dumps(data, allow_nan=False)
    assert data["curves"][0]["mean"] is None  # type: ignore[index]


# The picture


@EVERY_CASE
def test_the_parts_fill_the_bar(case: synthetic.Case) -> None:
    parts = segments(case.facts)
    if parts:
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert [p.share for p in parts] == sorted(
            (p.share for p in parts), reverse=True
        ) or case.facts.breakdown is None


def test_waiting_in_the_bar_is_that_of_the_unprofiled_steps() -> None:
    facts = CASES["cpu"].facts
    assert facts.data_wait_us is not None and facts.breakdown is not None
    longer = replace(facts.data_wait_us, median=1.3 * facts.data_wait_us.median)
    changed = replace(facts, data_wait_us=longer)
    wait = next(part for part in segments(changed) if part.label == "waiting for the DataLoader")
    assert wait.share == pytest.approx(changed.data_wait_fraction)
    assert percent(wait.share) != percent(facts.breakdown.share["data_wait"])
    assert sum(part.share for part in segments(changed)) == pytest.approx(1)
    on_gpu, label = CASES["gpu"].facts, "waiting for the DataLoader"
    of_gpu = next(part for part in segments(on_gpu) if part.label == label)
    waited = replace(on_gpu, data_wait_us=replace(on_gpu.data_wait_us or longer, median=1e9))
    assert of_gpu.share == next(part for part in segments(waited) if part.label == label).share


def test_steps_are_drawn_as_high_as_they_took() -> None:
    case = CASES["gpu"]
    areas = re.findall(r'd="M0 100(.*?)z"', picture(case.facts))
    heights = [[100 - float(y) for y in re.findall(r"V([\d.]+)", area)] for area in areas]
    binned = run_figure.binned_steps(case.facts)
    whole = [height for height in heights[0] if height]  # between bars it is 0
    assert whole == pytest.approx((100 * binned.height_ms / binned.top_ms).tolist(), abs=0.1)
    for above, below in pairwise(heights):
        assert all(a >= b for a, b in zip(above, below, strict=True)), "each part lies over the sums below it"


def test_a_late_first_step_begins_the_drawing() -> None:
    """A script imports for seconds before it trains: its steps are not pressed into the last part of the width."""
    case = CASES["cpu"]
    steps, wall_ns = case.run.steps, case.run.wall_ns
    late = replace(steps, start_ns=steps.start_ns + 9 * wall_ns, end_ns=steps.end_ns + 9 * wall_ns)
    run = replace(case.run, steps=late, wall_ns=10 * wall_ns)
    drawn = picture(replace(case.facts, run=run, breakdown=None))
    left = [float(x) for x in re.findall(r"H([\d.]+)V", drawn)]
    assert min(left) == 0 and max(left) <= 1000 and "after the start" in drawn
    assert "from the start to" in picture(case.facts)


def test_bars_are_means_and_profiled_steps_stand_apart() -> None:
    case = synthetic.long_case(4_000)
    steps, found = case.run.steps, run_figure.binned_steps(case.facts)
    assert len(found.left_s) <= run_figure.MOST_BARS + 10
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
    found = run_figure.binned_steps(case.facts)
    assert found.per_bar == 1 and len(found.left_s) == len(case.run.steps)
    assert case.facts.breakdown is not None
    first = case.facts.breakdown.steps[0]
    row = int(np.flatnonzero(found.profiled)[0])
    for part, ns in first.parts_ns.items():
        assert found.parts_ms[part][row] == pytest.approx(ns / MS)
    assert found.parts_ms["compute"][~found.profiled].sum() == 0, "an untraced step knows no compute"


def test_a_meter_that_pauses_draws_no_line_over_the_hole() -> None:
    t = np.concatenate([np.arange(10), np.arange(100, 110)]) * 100 * MS
    series = Series("cpu_pct", "%", "CPU", "psutil", t, np.arange(20.0))
    at, mean = run_figure.at_most(series, 350)
    assert np.isnan(mean).sum() == 1 and np.isfinite(at).all()
    assert mean[~np.isnan(mean)].tolist() == np.arange(20.0).tolist()


def test_many_readings_are_drawn_as_means() -> None:
    value = np.random.default_rng(1).normal(50, 10, 10_000)
    series = Series("cpu_pct", "%", "CPU", "psutil", np.arange(10_000) * MS, value)
    at, mean = run_figure.at_most(series, 350)
    assert len(at) <= 350
    groups = np.split(value, range(29, 10_000, 29))
    assert mean.tolist() == pytest.approx([g.mean() for g in groups])


def test_nesting_counts_the_enclosing_spans() -> None:
    rng = np.random.default_rng(3)
    spans = sorted(_nested(rng, 0, 1_000_000, 6), key=lambda s: (s[0], -s[1]))
    start, end = np.array([s[0] for s in spans]), np.array([s[1] for s in spans])
    dumb = [sum(a <= s and e <= b and (a, b) != (s, e) for a, b in spans) for s, e in spans]
    assert timeline_page.nesting(start, end).tolist() == dumb


def _nested(rng: np.random.Generator, start: int, end: int, depth: int) -> list[tuple[int, int]]:
    if depth == 0 or end - start < 20:
        return []
    cuts = np.unique(rng.integers(start + 1, end, 6)).tolist()
    inside = [(a, b) for a, b in zip(cuts[:-1:2], cuts[1::2], strict=False)]
    return inside + [s for a, b in inside for s in _nested(rng, a, b, depth - 1)]


# Whole cells and real facts


def test_a_window_without_a_whole_step_marks_no_step() -> None:
    case = CASES["cpu"]
    shown = facts(replace(case.run, traced_numbers=()))
    assert shown.breakdown is not None and shown.breakdown.whole_window
    assert not run_figure.binned_steps(shown).profiled.any()


def test_what_the_breakdown_has_as_a_part_is_no_top_operator() -> None:
    loader = CostRow("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1.0, 900.0, 900.0, 0.9)
    product = CostRow("aten::addmm", 1.0, 100.0, 100.0, 0.1)
    updating = CostRow("Optimizer.step#Adam.step", 1.0, 800.0, 800.0, 0.8)
    section = _costliest("Top operators", "", without_parts([loader, updating, product]), None)
    assert section is not None and section.result == "addmm, 10 % of traced time" and len(section.rows) == 1
    assert _costliest("x", "", without_parts([loader, updating]), None) is None
