"""A table of runs for a terminal and for a notebook: which there are, what their step took, how each ended."""

from __future__ import annotations

import html as markup
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from gpulab.analysis.steps import select, spread_of_steps, steps_per_round
from gpulab.formatting import duration, plural
from gpulab.run import Run
from gpulab.store.lookup import Entry
from gpulab.store.runs import Runs
from gpulab.views.html import plain_table
from gpulab.views.text import aligned
from gpulab.views.wording import cut, plain, rank_words, shortened

SHOWN = 20
WIDEST_NAME = 32
WIDEST_ASKED = 200
TITLES = ("", "name", "id", "started", "step", "steps", "took", "device", "outcome")
_NUMBERS = ("", "step", "steps", "took")


def text(runs: Runs, count: int | None = SHOWN) -> str:
    """The newest `count` runs (None: all) as a table, and every folder that cannot be read with its reason."""
    rows = runs.rows(count)
    readable = [_cells(row, row.run) for row in rows if row.run is not None]
    lines = aligned(TITLES, readable, _NUMBERS) if readable else [_none(runs)]
    return "\n".join(lines + _remarks(runs, rows))


def html(runs: Runs, count: int | None = SHOWN) -> str:
    """The same table for a notebook: escaped, inline styles only."""
    rows = runs.rows(count)
    readable = [_cells(row, row.run) for row in rows if row.run is not None]
    table = plain_table(TITLES, readable, _NUMBERS) if readable else f"<p>{markup.escape(_none(runs))}</p>"
    remarks = "".join(f'<p style="margin:0.3em 0">{markup.escape(line)}</p>' for line in _remarks(runs, rows))
    return table + remarks


class Table(Struct, frozen=True):
    """Runs to `display`: the newest `count`, or all (None)."""

    runs: Runs
    count: int | None = SHOWN

    def __repr__(self) -> str:
        return text(self.runs, self.count)

    def _repr_html_(self) -> str:
        return html(self.runs, self.count)


def _cells(row: Entry, run: Run) -> tuple[str, ...]:
    rows = select(run).rows
    step = spread_of_steps(run, run.steps.time_ns[rows], rows, steps_per_round(run, rows))
    return (
        str(row.position),
        shortened(plain(_called(row, run)), WIDEST_NAME) or "–",
        plain(row.id) + ("" if row.path else " (not saved)"),
        _local_time(run.created),
        duration(step.median if step else None),
        f"{len(run.steps):,}",
        duration(run.code_wall_ns / 1e3),
        cut(plain(run.device.name), WIDEST_NAME),
        _outcome(row, run),
    )


def _called(row: Entry, run: Run) -> str:
    """Its name, what was changed for it where the name does not say so, and its ranks."""
    changed = ", ".join(f"{name}={value}" for name, value in run.settings.knobs.items())
    name = run.settings.name
    return " · ".join(filter(None, (name, "" if changed in name else changed, rank_words(run.job, len(row.outcomes)))))


def _outcome(row: Entry, run: Run) -> str:
    """Of several ranks the one that most of those share which did not complete, and of how many."""
    if run.reached_step_limit and set(row.outcomes) <= {"stopped"}:
        return "step limit"
    others = Counter(outcome for outcome in row.outcomes if outcome != "completed")
    if not others:
        return run.outcome
    outcome, count = others.most_common(1)[0]
    return f"{outcome} ({count} of {len(row.outcomes)})" if count < len(row.outcomes) else outcome


def _local_time(created: str) -> str:
    """Of this machine; the id has it in UTC."""
    try:
        return f"{datetime.fromisoformat(created).astimezone():%d %b %H:%M:%S}"
    except ValueError:  # of a file from elsewhere
        return "–"


def _none(runs: Runs) -> str:
    if runs.conditions:
        return f"No run matches: {cut(plain(runs.conditions), WIDEST_ASKED)}."
    return f"No run yet in {plain(str(runs.store.root))}."


def _remarks(runs: Runs, rows: Sequence[Entry]) -> list[str]:
    hidden = len(runs) - sum(row.runs for row in rows if row.position is not None)
    more = [f"… and {plural(hidden, 'older run')}"] if hidden > 0 else []
    folder = [f"Saved in {cut(plain(str(runs.store.root)), WIDEST_ASKED)}."] if any(row.path for row in rows) else []
    return (
        more
        + folder
        + [f"{plain(row.id)}: unreadable, {plain(row.problem)}" for row in rows if row.problem is not None]
    )
