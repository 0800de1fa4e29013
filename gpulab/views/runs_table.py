"""A table of runs for a terminal and for a notebook: which there are, what their step took, how each ended."""

from __future__ import annotations

import html as markup
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpulab.analysis.steps import select, spread_of_rounds, turns_of
from gpulab.formatting import duration, plural
from gpulab.run import Run
from gpulab.views.wording import cut, plain

SHOWN = 20
WIDEST_NAME = 32
WIDEST_ASKED = 200
TITLES = ("", "name", "id", "step", "steps", "took", "device", "outcome")
_NUMBERS = ("", "step", "steps", "took")


class Row(Protocol):
    """One line: a run, or a folder that cannot be read."""

    @property
    def id(self) -> str:
        """Of the run, or the folder's name."""

    @property
    def position(self) -> int | None:
        """Counted from the end: -1 is the newest."""

    @property
    def run(self) -> Run | None:
        """None: it cannot be read."""

    @property
    def path(self) -> Path | None:
        """None: not saved."""

    @property
    def problem(self) -> str | None:
        """Why it cannot be read."""


class Folder(Protocol):
    """Where runs are kept."""

    @property
    def root(self) -> Path:
        """As a user finds it."""


class Rows(Protocol):
    """The runs of a table, as `gpulab.store.runs.Runs` has them."""

    @property
    def store(self) -> Folder:
        """Named where there is no run."""

    @property
    def asked(self) -> str:
        """The conditions in words; empty where all runs are here."""

    def __len__(self) -> int: ...

    def rows(self, count: int | None = None) -> Sequence[Row]:
        """The newest `count` (None: all), newest first, then what cannot be read."""


def text(runs: Rows, count: int | None = SHOWN) -> str:
    """The newest `count` runs (None: all) as a table, and every folder that cannot be read with its reason."""
    rows = runs.rows(count)
    readable = [_cells(row, row.run) for row in rows if row.run is not None]
    lines = _aligned([TITLES, *readable]) if readable else [_none(runs)]
    return "\n".join(lines + _remarks(runs, rows))


def html(runs: Rows, count: int | None = SHOWN) -> str:
    """The same table for a notebook: escaped, inline styles only."""
    rows = runs.rows(count)
    readable = [_cells(row, row.run) for row in rows if row.run is not None]
    table = _html_table(readable) if readable else f"<p>{markup.escape(_none(runs))}</p>"
    remarks = "".join(f'<p style="margin:0.3em 0">{markup.escape(line)}</p>' for line in _remarks(runs, rows))
    return table + remarks


@dataclass(frozen=True, slots=True)
class Table:
    """Runs to `display`: the newest `count`, or all (None)."""

    runs: Rows
    count: int | None = SHOWN

    def __repr__(self) -> str:
        return text(self.runs, self.count)

    def _repr_html_(self) -> str:
        return html(self.runs, self.count)


def _cells(row: Row, run: Run) -> tuple[str, ...]:
    rows = select(run).rows
    step = spread_of_rounds(run.steps.time_ns[rows], rows, turns_of(run, rows))
    return (
        str(row.position),
        cut(plain(run.settings.name), WIDEST_NAME) or "–",
        plain(row.id) + ("" if row.path else " (not saved)"),
        duration(step.median if step else None),
        f"{len(run.steps):,}",
        duration(run.code_wall_ns / 1e3),
        cut(plain(run.device.name), WIDEST_NAME),
        run.outcome,
    )


def _none(runs: Rows) -> str:
    if runs.asked:
        return f"No run fits: {cut(plain(runs.asked), WIDEST_ASKED)}."
    return f"No run yet in {plain(str(runs.store.root))}."


def _remarks(runs: Rows, rows: Sequence[Row]) -> list[str]:
    hidden = len(runs) - sum(row.position is not None for row in rows)
    more = [f"… and {plural(hidden, 'older run')}"] if hidden > 0 else []
    return more + [f"{plain(row.id)}: unreadable, {plain(row.problem)}" for row in rows if row.problem is not None]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(_padded, TITLES, line, widths)).rstrip() for line in table]


def _padded(title: str, cell: str, width: int) -> str:
    return cell.rjust(width) if title in _NUMBERS else cell.ljust(width)


def _html_table(table: Sequence[Sequence[str]]) -> str:
    head = "".join(_html_cell("th", title, title) for title in TITLES)
    body = "".join(f"<tr>{''.join(map(_html_cell, ['td'] * len(line), TITLES, line))}</tr>" for line in table)
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _html_cell(tag: str, title: str, cell: str) -> str:
    align = "right" if title in _NUMBERS else "left"
    return f'<{tag} style="text-align:{align};padding:2px 8px;white-space:nowrap">{markup.escape(cell)}</{tag}>'
