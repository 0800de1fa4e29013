"""The findings as the report shows them: each cause with its cost, its evidence and its cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpulab.analysis.source_lines import SourceLine
from gpulab.diagnosis.catalogue import kind_of, title_for, title_of
from gpulab.diagnosis.finding import BETWEEN, Diagnosis, Evidence, Finding
from gpulab.diagnosis.headline import figures, summary
from gpulab.formatting import capitalized, duration, factor, percent, picked, plural
from gpulab.prediction.prediction import Prediction
from gpulab.views.bars import BLUE
from gpulab.views.layout import PAIRS, Column, Row, Section, present
from gpulab.views.wording import plain

MOST_FINDINGS = 5
LESSON = "learn more"
_SLOWER = "predicted: may also be slower"
_SURE = {
    "measured": "measured",
    "likely": "likely: the figures fit",
    "possible": "possible: worth a try, this run alone can't show it",
}


def finding_sections(
    diagnosis: Diagnosis, *, below_headline: bool, source: str | None = None, ranks: int | None = None
) -> tuple[Section, ...]:
    """A section for each of the first findings, and the notes about them.

    `below_headline`: the headline already shows the first finding's sentence and first figure. `source`: what was run;
    None: unknown. `ranks`: the number of ranks in which a fix is to be tried.
    """
    causes = [f for f in diagnosis.findings if not kind_of(f.key).is_verdict]
    sections: list[Section] = []
    for number, finding in enumerate(causes[:MOST_FINDINGS], start=1):
        stands_above = below_headline and finding is diagnosis.first
        sections.append(_section(number, finding, diagnosis, stands_above, source, ranks))
        sections += present(source_section(number, finding) if diagnosis.few_steps is None else None)
    lines = [plain(note) for note in diagnosis.notes]
    if len(causes) > MOST_FINDINGS:
        rest = ", ".join(title_for(f) for f in causes[MOST_FINDINGS:])
        lines.insert(0, f"{plural(len(causes) - MOST_FINDINGS, 'smaller finding')} not shown: {rest}.")
    if lines:
        sections.append(Section("About these findings", lines=tuple(lines), wide=True))
    return tuple(sections)


def open_questions_section(diagnosis: Diagnosis) -> Section | None:
    """The questions that no rule could decide, and what to record so that a rule can; None if no question is open."""
    by_cure: dict[str, list[str]] = {}
    for question in diagnosis.untold:
        by_cure.setdefault(question.record, []).append(question.what)
    if not by_cure:
        return None
    cells = ((plain("; ".join(dict.fromkeys(what))), plain(record)) for record, what in by_cure.items())
    columns = (Column("", "wrap"), Column("how to find out", "wrap"))
    return Section.table("Open questions", columns, cells, aside=True)


def documents(diagnosis: Diagnosis) -> dict[str, object]:
    """`findings` and `untold` as plain data; None means not measurable or absent."""
    return {
        "findings": [_document(f) for f in diagnosis.findings],
        "untold": diagnosis.untold,
    }


# -- one finding -------------------------------------------------------------------------------------------------------


def to_try(settings: str, source: str | None, ranks: int | None) -> str:
    """The command that compares a setting: for a script, in the terminal; for all else, in a cell."""
    if source in ("script", "trace"):
        if ranks:
            return f"on your script, without an edit: gpulab record --ranks {ranks} --set {settings} SCRIPT"
        return f"on your script, without an edit: gpulab record --ab {settings} SCRIPT"
    where = "on your cell" if source in ("cell", "statement", None) else "with this code in a cell of a notebook"
    return f"{where}, without an edit: %%gpuprofile --ab {settings}{f' --ranks {ranks}' if ranks else ''}"


def _section(
    number: int, finding: Finding, diagnosis: Diagnosis, in_headline: bool, source: str | None, ranks: int | None
) -> Section:
    rows = [] if in_headline else [("finding", plain(summary(finding, diagnosis)))]
    rows.append(("memory", finding.memory) if finding.memory else ("potential saving", _saving(finding, diagnosis)))
    if finding.source_line:
        unsure = "; the samples don't show which of its lines" if finding.names_function else ""
        rows.append(("your code" if unsure else "your line", f"{plain(finding.source_line)}{unsure}"))
    if finding.cure:
        rows.append(("fix", plain(finding.cure)))
    if finding.knob:
        knob = plain(finding.knob).replace(", ", ",")
        where, command = to_try(knob, source, ranks).split(": ", 1)
        slower = f"; {_SLOWER}" if _may_slow_down(finding.predicted_interval) else ""
        rows.append(("try it", f"{where}{slower}: {command}"))
    details = [
        cells
        for cells in _details(finding, figures(finding, diagnosis)[int(in_headline) :])
        if diagnosis.few_steps is None or "%" not in cells[1]
    ]
    title = f"{number}. {capitalized(title_for(finding))}"
    lines = [Row(cells) for cells in rows]
    lines += [Row(cells, detail=True, lesson=finding.lesson if cells[0] == LESSON else "") for cells in details]
    return Section(title, PAIRS, tuple(lines), wide=True, lead=number == 1, result=_most(finding, diagnosis))


def _details(finding: Finding, evidence: Sequence[Evidence]) -> Iterator[tuple[str, str]]:
    """The explanation of a finding, for a reader who wants to know why."""
    yield from _evidence_cells(evidence)
    if finding.knob:
        yield "predicted", _predicted(finding.prediction)
    elif finding.prediction is not None and finding.prediction.interval is not None:
        yield "without it", f"predicted: {_predicted(finding.prediction)}"
    if finding.lesson:
        yield LESSON, f"notebooks/{plain(finding.lesson)}.ipynb"
    if finding.after:
        yield "next", plain(finding.after)


def _evidence_cells(evidence: Sequence[Evidence]) -> Iterator[tuple[str, str]]:
    for i, figure in enumerate(evidence):
        text = plain(figure.words)
        where = f" (see the timeline from {figure.span[0] / 1e9:.3f} s on)" if figure.span is not None else ""
        yield "evidence" if i == 0 else "", f"{capitalized(text)}{where}"


def _saving(finding: Finding, diagnosis: Diagnosis) -> str:
    sure = _SURE[finding.confidence]
    if finding.once_us is not None:
        return f"{duration(finding.once_us)}, once ({sure})"
    if finding.recoverable_us_per_step is None:
        return f"size unknown ({sure})"
    shared = [_title_in(diagnosis, key) for key in finding.shares_with]
    besides = f"; overlaps with {' and '.join(shared)}, counted there" if shared else ""
    return f"{_most(finding, diagnosis)}{besides} ({sure})"


def _title_in(diagnosis: Diagnosis, key: str) -> str:
    other = diagnosis.of(key)
    return title_of(key) if other is None else title_for(other)


def _most(finding: Finding, diagnosis: Diagnosis) -> str:
    """The most time that the fix can save, and from which total; or its price in memory."""
    if finding.memory:
        return finding.memory
    time_us = finding.recoverable_us_per_step
    if time_us is None:
        return "size unknown"
    beside = any(part.startswith(BETWEEN) for part in finding.parts)
    of_us = diagnosis.total_us if beside else diagnosis.step_us
    of = "the traced time" if diagnosis.whole_window else "the training time" if beside else "a typical step"
    share = f", {percent(time_us / of_us)} of {of}" if of_us and diagnosis.few_steps is None else ""
    per = "" if diagnosis.whole_window else "/step"
    return f"up to {duration(time_us)}{per}{share}"


def _predicted(prediction: Prediction | None) -> str:
    """The predicted time with its range, or why there is no prediction."""
    if prediction is None:
        return "not predicted"
    if prediction.interval is None:
        return f"not predicted; {plain(prediction.refused) or 'the evidence does not carry it'}"
    words = _speed(prediction.ratio, prediction.interval, only_range=prediction.only_sign)
    if prediction.memory_ratio is not None and prediction.memory_ratio != 1:
        words += f"; the peak of the GPU's memory becomes {factor(prediction.memory_ratio)}× today's"
    elif prediction.memory_basis:
        words += f"; {plain(prediction.memory_basis)}"
    basis = plain(prediction.basis).rstrip(".")
    return f"{words}. {basis}." if basis else f"{words}."


def _speed(ratio: float | None, interval: tuple[float, float], *, only_range: bool) -> str:
    """ "speedup 1.25× (1.11–1.43)"; the text also says if the setting may be slower."""
    low, high = interval
    if high <= 0:
        return "speedup of many times"
    between = f"{factor(1 / high)}–{factor(1 / low) if low > 0 else 'many'}"
    words = f"speedup {between}" if only_range or not ratio else f"speedup {factor(1 / ratio)}× ({between})"
    return f"{words}; it may also be slower" if _may_slow_down(interval) else words


def _may_slow_down(interval: tuple[float, float] | None) -> bool:
    """Whether a prediction's range reaches beyond today's time."""
    return interval is not None and interval[1] > 1


def _document(finding: Finding) -> dict[str, object]:
    evidence = [
        {"words": e.words, "span_us": None if e.span is None else [t / 1e3 for t in e.span]} for e in finding.evidence
    ]
    return {
        **picked(finding, "key", "summary", "level"),
        "evidence": evidence,
        **picked(finding, "recoverable_us_per_step", "once_us", "confidence", "knob"),
        "cure": finding.cure or None,
        **picked(finding, "predicted_ratio", "predicted_interval", "prediction"),
        "source_line": finding.source_line or None,
        "source": finding.source,
        "lesson": finding.lesson or None,
        "after": finding.after or None,
        "shares_with": finding.shares_with,
    }


# The user's source with its cost: the lines around the line that a finding names, each with its share of the time.


HOTTEST = 3  # lines that a terminal shows at once


def source_section(number: int, finding: Finding) -> Section | None:
    """The finding's source lines as a section; None if it names no line."""
    if not finding.source:
        return None
    columns = (Column("line", "number"), Column("of this time", "number"), Column("your source", "code"))
    hottest = sorted(finding.source, key=lambda line: -(line.share or 0.0))[:HOTTEST]
    rows = tuple(_row(line, detail=line not in hottest) for line in finding.source)
    title = "Your source beside its cost" + (f" (finding {number})" if number > 1 else "")
    first = hottest[0]
    result = f"line {first.number}, {percent(first.share or 0.0)}: {plain(first.text.strip())}"
    return Section(title, columns, rows, wide=True, lead=number == 1, result=result)


def _row(line: SourceLine, *, detail: bool) -> Row:
    share = "" if line.share is None else percent(line.share)
    return Row((str(line.number), share, plain(line.text)), line.share, BLUE, detail=detail)
