"""Whatever names a part of a step, the step or a speedup says the same: in each view of a run, of two, of a bench."""

from __future__ import annotations

import html
import re
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from gpulab.analysis.facts import Facts, facts
from gpulab.analysis.run_row import run_row
from gpulab.analysis.step_shares import StepShares, own_shares
from gpulab.api.diagnose import summarize
from gpulab.api.runs import TITLES, _cells
from gpulab.diagnosis.catalogue import kind_of
from gpulab.diagnosis.diagnose import diagnose
from gpulab.formatting import NOT_MEASURABLE, duration, percent
from gpulab.live_feed import SoFar
from gpulab.run import Phase, Run
from gpulab.store.folders import read
from gpulab.store.lookup import Entry
from gpulab.thresholds import DEFAULT
from gpulab.tuning.bench import Bench, Row, baseline_row, between, row_of, rows_of, with_run
from gpulab.tuning.compare.blocks import UNPROFILED, compare_blocks, compare_runs, kind_of_steps
from gpulab.tuning.record import BASELINE, Comparison, Side
from gpulab.views import bench as view
from gpulab.views import side_by_side
from gpulab.views.comparison import Compared
from gpulab.views.live_view import _sentence
from gpulab.views.report.report import Report
from gpulab.views.wording import OWN_BATCHES, PARTS
from planted.golden import cases
from tests.support import rule_cases, synthetic
from tests.support.comparisons import blocks
from tests.support.core_readings import with_cores
from tests.support.markup import Markup

MADE, COMPARED = 200, 20
PCT = r"(?:[<>] )?\d+(?:\.\d+)? %"
TIME = r"[\d.,]+ (?:µs|ms|s)"
LABELS = {part.label: key for key, part in PARTS.items()} | {OWN_BATCHES.label: "data_wait"}
LABEL = "|".join(map(re.escape, LABELS))
ALONE = "TRACED STEPS ONLY"
# A sentence with a share or a time → the part that it is of; "idle" and "working" are of a GPU, "step" is the whole.
SENTENCES = {
    rf"({PCT}) of (?:each step|the traced time) waits on the DataLoader": "data_wait",
    rf"({PCT}) of (?:each step|the traced time) goes to making the next batch": "data_wait",
    rf"({TIME}) of each {TIME} step is data wait": "data_wait",
    rf"[Ww]aiting for a core takes {TIME} of each {TIME} step \(({PCT})\)": "core_wait",
    rf"[Ww]aiting for a core takes ({TIME}) of each {TIME} step \(": "core_wait",
    rf"[Nn]o free core for [^:]*: waiting for a core ({TIME})": "core_wait",
    rf"[Ff]or ({PCT}) of (?:each step|the traced time) (?:the GPU|this rank) exchanges": "communication",
    rf"({TIME}) of {TIME} are communication": "communication",
    rf"[Ff]or ({PCT}) of (?:each step|the traced time) PyTorch ran nothing": "unknown",
    rf"what happened in ({PCT}) of the time is unknown": "unknown",
    rf"[Tt]he CPU computes for ({PCT})": "compute",
    rf"GPU (?:works|computes) for ({PCT}) of": "working",
    rf"it works for only ({PCT}) of": "working",
    rf"in all, the GPU is idle for ({PCT})": "idle",
    rf"of (?:every|each) ({TIME}) step": "step",
    rf"[Aa] step took ({TIME}) \(median of": "step",
}


def golden_runs() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as scratch:
        cases.unpack(Path(scratch))
        for case in cases.cases(Path(scratch)):
            if case.kind == "run":
                yield read(Path(case.path))


def made_ones() -> Iterator[Facts]:
    """On both devices: what the profiled steps wait has nothing to do with what the others do, nor their length."""
    rng = np.random.default_rng(32)
    names = [name for name in PARTS if name != "start_up"]
    for i in range(MADE):
        gpu, workers = bool(i % 2), int(rng.integers(0, 3))
        run = rule_cases.run_of(gpu=gpu, wait=float(rng.uniform(0, 1)), workers=workers)
        longer = np.where(np.isin(np.arange(len(run.steps)), run.traced_rows), rng.uniform(0.5, 2.0), 1.0)
        run = _stretched(run, longer * rng.lognormal(0, 0.1, len(longer)))
        if rng.random() < 0.7:
            run = with_cores(run, waited=float(rng.uniform(0, 0.8)), others=float(rng.uniform(0, 2)),
                             pool_waiting=float(rng.uniform(0, 2)))  # fmt: skip
        if rng.random() < 0.2:
            counted = np.flatnonzero(run.steps.phase == Phase.MEASURED)[: 4 * int(rng.random() < 0.5)]
            phase = np.where(run.steps.phase == Phase.TRACED, Phase.TRACED, Phase.WARMUP).astype(np.uint8)
            phase[counted] = Phase.MEASURED
            run = replace(run, steps=replace(run.steps, phase=phase))
        if rng.random() < 0.1:
            yield replace(facts(replace(run, timeline=None)), breakdown=None)
            continue
        shares = dict(zip(names, rng.dirichlet(np.full(len(names), 0.3)).tolist(), strict=True))
        yield replace(facts(run), breakdown=_uneven(synthetic.breakdown(run, shares, 0.5 if gpu else None), rng))


def _stretched(run: Run, factor: np.ndarray) -> Run:
    steps = run.steps
    wall_ns = (steps.wall_ns * factor).astype(np.int64)
    end_ns = int(steps.start_ns[0]) + np.cumsum(wall_ns)
    wait_ns = (steps.data_wait_ns * factor).astype(np.int64)
    return replace(run, steps=replace(steps, start_ns=end_ns - wall_ns, end_ns=end_ns, data_wait_ns=wait_ns))


def _uneven(account: Any, rng: np.random.Generator) -> Any:
    """One profiled step is another: its largest part became unknown."""
    odd = int(rng.integers(len(account.steps)))
    parts = dict(account.steps[odd].parts_ns)
    largest = max(parts, key=lambda name: parts[name])
    parts["unknown"] += parts[largest] if largest != "unknown" else 0
    parts[largest] = parts[largest] if largest == "unknown" else 0
    steps = tuple(replace(s, parts_ns=parts) if i == odd else s for i, s in enumerate(account.steps))
    total = sum(sum(s.parts_ns.values()) for s in steps)
    share = {name: sum(s.parts_ns[name] for s in steps) / total for name in account.share}
    return replace(account, steps=steps, share=share)


@pytest.mark.slow("every view of all golden runs and of 200 made ones")
def test_every_view_of_a_run_has_the_same_figures() -> None:
    checked = [0, 0]
    every = [*map(facts, golden_runs()), *made_ones()]
    for known in every:
        found = _all_agree(known)
        checked = [a + b for a, b in zip(checked, found, strict=True)]
    runs, last = every[:COMPARED], every[-COMPARED:]
    assert checked[0] > 5_000 and checked[1] > 1_500, "shares and times were read from the views"
    for known in runs:
        exported = run_row(known.run)["step_median_us"]
        assert exported == (None if known.step_us is None else known.step_us.median)
    for a, b in pairwise(runs):
        _comparison_agrees(a, b)
    divided = [_bench_agrees(a, b, longer) for a, b in zip(last, last[2:], strict=False) for longer in (1.0, 5.0)]
    assert any(divided), "made ones in a row are of two devices: those with one between are compared"


def _all_agree(known: Facts) -> tuple[int, int]:
    report = Report(known, diagnose(known, predict_cures=False))
    text, page, document = report.text(full=True), html.unescape(report.fragment(full=True)), report.json()
    shares = known.shares
    where = known.run.name or known.run.id
    _the_step_has_one_length(known, report, document, text, page)
    row = _row_agrees(known)
    if shares is None:
        return 0, 0
    assert sum(shares.share.values()) + shares.undivided == pytest.approx(1), where
    assert min(shares.share.values()) >= 0 and shares.undivided >= 0, where
    breakdown: Any = document["breakdown"]
    if breakdown is not None:
        assert breakdown["share"] == pytest.approx(dict(shares.share))
        if shares.step_us is not None:
            assert sum(breakdown["part_us"].values()) == pytest.approx(shares.step_us)
    said = "\n".join(
        [
            report.headline.sentence,
            report.headline.evidence,
            *(f.summary for f in report.diagnosis.findings),
            *(e.words for f in report.diagnosis.findings for e in f.evidence),
        ]
    )
    for finding in report.diagnosis.findings:
        assert (finding.recoverable_us_per_step or 0.0) <= 1.001 * (report.diagnosis.total_us or np.inf), where
    main = text.partition(ALONE)[0]
    assert ALONE not in page.upper(), "the traced steps alone stand in the whole text only"
    counted = [0, 0]
    if known.few_steps is not None:
        assert "%" not in report.headline.sentence + report.headline.evidence, where
        shown = "\n".join((text, page, row))
        assert not [w for _, w in (*_beside_labels(shown), *_sentences(shown)) if w[-1] == "%"], where
        return 0, 0
    own = own_shares(known) if any(kind_of(f.key).role == "context" for f in report.diagnosis.findings) else None
    for key, written in (*_beside_labels(main), *_beside_labels(re.sub(r"<(?!b>|/b>)[^>]*>", "\n", page))):
        counted[written[-1] != "%"] += 1
        assert written == _figure(shares, key, written), (where, key, written)
    for key, written in _sentences(said):  # of the process's own time, where others take its cores
        counted[written[-1] != "%"] += 1
        assert written in {_figure(s, key, written) for s in (shares, own) if s is not None}, (where, key, written)
    return counted[0], counted[1]


def _row_agrees(known: Facts) -> str:
    """A row of the bench that nothing is compared with, and the live view at the end of the run: as the report."""
    rows = view.ordered(Bench("x", (with_run(Row("a"), Side(BASELINE, {}, known)),)))
    page, typical, shares = html.unescape(view.picture(rows)), known.typical_step_us, known.shares
    assert _times(page) == ([duration(typical.median)] if typical is not None else [])
    assert typical is None or f"{duration(typical.median)} per step" in view.words(rows[0], None, rows[0])
    drawn = re.findall(rf'title="({LABEL}) ({PCT})"', page)
    assert bool(drawn) == (shares is not None and known.few_steps is None)
    for label, written in drawn:
        assert shares is not None and written == percent(shares.share[LABELS[label]])
    untraced = facts(replace(known.run, timeline=None))  # as the live view has it: of a GPU it knows no share
    live = _sentence(SoFar(untraced.run, DEFAULT))
    for key, written in _sentences(live if untraced.shares is not None else ""):
        assert written in {_figure(s, key, written) for s in (untraced.shares, own_shares(untraced)) if s is not None}
    return f"{page}\n{view.words(rows[0], None, rows[0])}\n{live}"


def _times(table: str) -> list[str]:
    return re.findall(r'<td class="gp-time"[^>]*><div>([^<]+)</div>', table)


def _bench_agrees(a: Facts, b: Facts, longer: float) -> bool:
    """Of two rows: times as the comparison has them, one speedup, the report's own time by its own name; no parts of a
    run that took `longer` than the blocks. Returns whether the comparison has parts.
    """
    if a.typical_step_us is None or b.typical_step_us is None:
        return False
    of_a, of_b = (known.typical_step_us.median / 1e3 / longer for known in (a, b))  # type: ignore[union-attr]
    sides = (Side(BASELINE, {}, a, blocks(0, of_a)), Side("x=1", {"x": "1"}, b, blocks(1, of_b)))
    c = compare_blocks(*sides)
    document: Any = Compared(c).json()
    first = baseline_row(Row("a"), c.a, 0, [c])
    bench = Bench("x", (first, row_of(Row("b", {"x": "1"}), c, first, 0)))
    rows, us = view.ordered(bench), [document[side]["us_per_step"] for side in "ab"]
    of_both = rows[0], rows[1]
    table, detail = view.picture(rows), side_by_side.fragment(*of_both, a, b, between(*of_both))
    assert [row.step_us for row in rows] == pytest.approx(us)
    assert [row.step_us for row in rows_of((c,))] == pytest.approx(us)
    assert (
        _times(table) == [duration(step_us) for step_us in us]
        and "Step time: baseline in its blocks ÷ speedup" in table
    )
    assert c.unit == "sample" or all(duration(step_us) in Markup(detail).words for step_us in us)
    assert [row.shares for row in rows_of((c,))] == [row.shares for row in rows]
    for row, known in zip(rows, (a, b), strict=True):
        own = duration(known.typical_step_us.median)  # type: ignore[union-attr]
        assert f": {own} per step. In the table, " in Markup(view.full_run_words(row)).text
        assert row.run_agrees is (longer == 1) and (row.run_agrees or not row.shares)
        assert row.run_agrees or (f"{own} in its traced run" in table and f"{own} in its traced run" in detail)
        assert not row.shares or (known.shares is not None and row.shares.items() <= known.shares.share.items())
    assert longer == 1 or not c.parts
    if c.verdict in ("faster", "undecided", "no measurable difference") and c.ratio is not None:
        report = Report(b, diagnose(b, predict_cures=False), speed=rows[1].speed)
        beside = side_by_side.sentence(*of_both, rows[1].speed)
        said = (report.headline.sentence, beside, "\n".join(Markup(table).words))
        speedups = [re.search(r"([\d.,]+)×\s+\(([\d.,]+–[\d.,]+)\)", words) for words in said]
        assert len({found.groups() for found in speedups if found is not None}) == 1 and None not in speedups
    later = replace(sides[0], blocks=blocks(0, 3 * of_a, seed=9))
    moved = bench.put(baseline_row(first, later, 20, [compare_blocks(later, sides[1])]))
    assert [row.step_us for row in view.ordered(moved)] == pytest.approx(us), "what runs later moves no time"
    return bool(c.parts)


def _beside_labels(text: str) -> Iterator[tuple[str, str]]:
    for first, label in re.findall(rf"({PCT}) ({LABEL})(?![\w(])", text):
        yield LABELS[label], first
    for label, share in re.findall(rf"(?m)^\s*({LABEL})(?: <b>|[ █▏▎▍▋▊▉]+)({PCT})", text):
        yield LABELS[label], share
    for label, share, time in re.findall(rf"(?m)^\s+({LABEL})[ █▏▎▍▋▊▉]+({PCT}) +({TIME})", text):
        yield LABELS[label], share
        yield LABELS[label], time


def _sentences(said: str) -> Iterator[tuple[str, str]]:
    for pattern, key in SENTENCES.items():
        for written in re.findall(pattern, said):
            yield key, written


def _figure(shares: StepShares, key: str, written: str) -> str:
    whole = {"idle": shares.idle, "working": 1 - shares.idle, "step": 1.0}
    share = whole[key] if key in whole else shares.share[key]
    if written[-1] == "%":
        return percent(share)
    assert shares.step_us is not None
    return duration(share * shares.step_us)


def _the_step_has_one_length(known: Facts, report: Report, document: dict[str, Any], text: str, page: str) -> None:
    run, step = known.run, known.step_us
    listed = dict(zip(TITLES, _cells(Entry(run.id, run=run, position=0), run), strict=True))["step"]
    own = NOT_MEASURABLE if step is None else duration(step.median)
    assert listed == own
    assert (document["step_us"] or {}).get("median") == (None if step is None else step.median)
    typical = known.typical_step_us
    if typical is None:
        return
    assert summarize(known, report.diagnosis).step_us == typical.median
    if known.shares is not None and known.shares.step_us is not None:
        assert known.shares.step_us == typical.median
    for title in re.findall(rf"Step breakdown, (?:median|mean) ({TIME})", page):
        assert title == duration(typical.median)
    for cell in re.findall(rf"(?m)^ +a step, without the profiler +({TIME})", text):
        assert cell == own


def _comparison_agrees(a: Facts, b: Facts) -> None:
    """Of two runs: their reports' times, a ratio of these, and parts that sum to them or none."""
    comparison = compare_runs([a.run, b.run])
    assert isinstance(comparison, Comparison)
    compared = Compared(comparison)
    document: Any = compared.json()
    how = kind_of_steps(comparison.a.facts, comparison.b.facts)
    for name, known in (("a", a), ("b", b)):
        side = document[name]
        step = known.step_us if how == UNPROFILED else known.traced_step_us
        assert step is None or side["us_per_step"] is None or side["us_per_step"] == step.median
        unit = "us_per_sample" if comparison.unit == "sample" else "us_per_step"
        of_part = f"{name}_us_per_sample" if comparison.unit == "sample" else f"{name}_us"
        if document["parts"] and document["parts"][0][of_part] is not None:
            assert sum(part[of_part] for part in document["parts"]) == pytest.approx(side[unit])
            assert known.shares is not None
            for part in document["parts"]:
                assert part[of_part] == pytest.approx(known.shares.share[part["name"]] * side[unit])
        else:
            assert not document["parts"] or document["parts"][0][of_part] is None
    rows = re.findall(rf"(?m)^ +a step, with(?:out)? the profiler +({TIME}) +({TIME})$", compared.text(full=True))
    assert rows == [tuple(duration(document[name]["us_per_step"]) for name in "ab")]
    if document["ratio"] is not None:
        assert document["ratio"] == pytest.approx(document["b"][unit] / document["a"][unit])
        assert document["interval"] is None or document["interval"][0] <= document["ratio"] <= document["interval"][1]
    assert (
        bool(document["parts"])
        or document["parts_left_out"]
        or document["ratio"] is None
        or any(known.breakdown is None for known in (a, b))
    )
