"""The user's source beside its cost: the lines around the one that a finding names, each with its share of the time."""

from __future__ import annotations

from gpulab.analysis.host.line_shares import SourceLine
from gpulab.diagnosis.finding import Finding
from gpulab.formatting import percent
from gpulab.views.html_bars import BLUE
from gpulab.views.layout import Column, Row, Section
from gpulab.views.wording import plain

HOTTEST = 3  # lines that a terminal shows at once


def source_section(number: int, finding: Finding) -> Section | None:
    """A block of lines; None where no line is named."""
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
