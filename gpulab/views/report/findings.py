"""What was found, as the report lays it out: each cause with what it costs, what shows it, and what cures it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gpulab.diagnosis.finding import BETWEEN, Diagnosis, Evidence, Finding
from gpulab.diagnosis.rules.catalogue import kind_of, title_of
from gpulab.formatting import capitalized, duration, factor, percent, plural
from gpulab.prediction.prediction import Prediction
from gpulab.views.layout import PAIRS, Column, Row, Section
from gpulab.views.wording import plain

SHOWN = 5
LESSON = "learn more"
_SURE = {
    "measured": "this was measured",
    "likely": "likely: the figures fit it, and nothing contradicts",
    "possible": "possible: worth a try, the run alone cannot show it",
}


def finding_sections(diagnosis: Diagnosis, *, below_headline: bool) -> tuple[Section, ...]:
    """A section for each of the first findings, and the notes about them.

    `below_headline`: the first finding's sentence and first figure stand above already.
    """
    causes = [f for f in diagnosis.findings if not kind_of(f.key).is_verdict]
    sections = [
        _section(number, finding, diagnosis, in_headline=below_headline and finding is diagnosis.first)
        for number, finding in enumerate(causes[:SHOWN], start=1)
    ]
    lines = [plain(note) for note in diagnosis.notes]
    if len(causes) > SHOWN:
        rest = ", ".join(title_of(f.key) for f in causes[SHOWN:])
        lines.insert(0, f"{plural(len(causes) - SHOWN, 'smaller finding')} not shown: {rest}.")
    if lines:
        sections.append(Section("About these findings", lines=tuple(lines), wide=True))
    return tuple(sections)


def untold_section(diagnosis: Diagnosis) -> Section | None:
    """What no rule could tell, and what to record so that it can; None where nothing was left open."""
    by_cure: dict[str, list[str]] = {}
    for untold in diagnosis.untold:
        by_cure.setdefault(untold.record, []).append(untold.what)
    if not by_cure:
        return None
    cells = ((plain("; ".join(dict.fromkeys(what))), plain(record)) for record, what in by_cure.items())
    columns = (Column("", "wrap"), Column("how to find out", "wrap"))
    return Section.table("What could not be told", columns, cells, aside=True)


def documents(diagnosis: Diagnosis) -> dict[str, object]:
    """`findings` and `untold` as plain data; None is "not measurable", or there is none."""
    return {
        "findings": [_document(f) for f in diagnosis.findings],
        "untold": [dataclasses.asdict(u) for u in diagnosis.untold],
    }


# -- one finding -------------------------------------------------------------------------------------------------------


def _section(number: int, finding: Finding, diagnosis: Diagnosis, *, in_headline: bool) -> Section:
    rows = [] if in_headline else [("found", plain(finding.summary))]
    rows.append(("would give back", _given_back(finding, diagnosis)))
    if finding.source_line:
        rows.append(("your line", plain(finding.source_line)))
    if finding.cure:
        rows.append(("cure", plain(finding.cure)))
    if finding.knob:
        knob = plain(finding.knob).replace(", ", ",")
        rows.append(("try it", f"on your cell, without an edit: %%gpuprofile --ab {knob}"))
    details = list(_details(finding, in_headline=in_headline))
    title = f"{number}. {capitalized(title_of(finding.key))}"
    lines = [Row(cells) for cells in rows]
    lines += [Row(cells, detail=True, lesson=finding.lesson if cells[0] == LESSON else "") for cells in details]
    return Section(title, PAIRS, tuple(lines), wide=True, lead=number == 1, result=_most(finding, diagnosis))


def _details(finding: Finding, *, in_headline: bool) -> Iterator[tuple[str, str]]:
    """What explains a finding, for a reader who wants to know why."""
    yield from _evidence_cells(finding.evidence[1:] if in_headline else finding.evidence)
    if finding.knob:
        yield "predicted", _predicted(finding.prediction)
    elif finding.prediction is not None and finding.prediction.interval is not None:
        yield "without it", f"predicted: {_predicted(finding.prediction)}"
    if finding.lesson:
        yield LESSON, f"notebooks/{plain(finding.lesson)}.ipynb"
    if finding.after:
        yield "after that", plain(finding.after)


def _evidence_cells(evidence: Sequence[Evidence]) -> Iterator[tuple[str, str]]:
    for i, figure in enumerate(evidence):
        text = plain(figure.words)
        where = f" (see the timeline from {figure.span[0] / 1e9:.3f} s on)" if figure.span is not None else ""
        yield "what shows it" if i == 0 else "", f"{capitalized(text)}{where}"


def _given_back(finding: Finding, diagnosis: Diagnosis) -> str:
    sure = _SURE[finding.confidence]
    if finding.once_us is not None:
        return f"{duration(finding.once_us)}, once: no other step is like it ({sure})"
    if finding.recoverable_us_per_step is None:
        return f"how much cannot be told from the run ({sure})"
    shared = [title_of(key) for key in finding.shares_with]
    besides = f"; it shares time with {' and '.join(shared)}, which is counted there" if shared else ""
    return f"{_most(finding, diagnosis)}{besides} ({sure})"


def _most(finding: Finding, diagnosis: Diagnosis) -> str:
    """The time that it would give back, and of what."""
    time_us = finding.recoverable_us_per_step
    if time_us is None:
        return "how much it costs cannot be told from the run"
    beside = any(part.startswith(BETWEEN) for part in finding.parts)
    of_us = diagnosis.total_us if beside else diagnosis.step_us
    of = "the profiled time" if diagnosis.whole_window else "the training time" if beside else "a typical step"
    share = f", {percent(time_us / of_us)} of {of}" if of_us else ""
    per = "" if diagnosis.whole_window else " per step"
    return f"at most {duration(time_us)}{per}{share}"


def _predicted(prediction: Prediction | None) -> str:
    """The predicted time with its range, or why there is none."""
    if prediction is None:
        return "not predicted"
    if prediction.interval is None:
        return f"nothing is predicted: {plain(prediction.refused) or 'the evidence does not carry it'}"
    low, high = prediction.interval
    between = f"between {factor(low)} and {factor(high)} of today's time"
    if prediction.ratio is None or prediction.only_sign:
        words = between
    else:
        speed = f"{factor(1 / prediction.ratio)} times as fast" if prediction.ratio > 0 else "faster"
        words = f"{factor(prediction.ratio)} of today's time ({speed}), {between}"
    if prediction.memory_ratio is not None and prediction.memory_ratio != 1:
        words += f"; {factor(prediction.memory_ratio)} of today's peak of the GPU's memory"
    elif prediction.memory_basis:
        words += f"; {plain(prediction.memory_basis)}"
    basis = plain(prediction.basis).rstrip(".")
    return f"{words}. {basis}." if basis else f"{words}."


def _document(finding: Finding) -> dict[str, object]:
    prediction = finding.prediction
    return {
        "key": finding.key,
        "summary": finding.summary,
        "level": finding.level,
        "evidence": [
            {"words": e.words, "span_us": None if e.span is None else [t / 1e3 for t in e.span]}
            for e in finding.evidence
        ],
        "recoverable_us_per_step": finding.recoverable_us_per_step,
        "once_us": finding.once_us,
        "confidence": finding.confidence,
        "knob": finding.knob,
        "cure": finding.cure or None,
        "predicted_ratio": finding.predicted_ratio,
        "predicted_interval": finding.predicted_interval,
        "prediction": None if prediction is None else dataclasses.asdict(prediction),
        "source_line": finding.source_line or None,
        "lesson": finding.lesson or None,
        "after": finding.after or None,
        "shares_with": finding.shares_with,
    }
