"""`gpulab runs`: the stored runs and those of this process as a table; to filter, name, delete and export them.

Python has the same as methods of `gpulab.runs`.
"""

from __future__ import annotations

import argparse
import difflib
import html as markup
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from gpulab.analysis.steps import select, spread_of_steps, steps_per_round
from gpulab.errors import UsageError
from gpulab.formatting import duration, plural, settings_words, size
from gpulab.run import Run
from gpulab.store.folders import Store
from gpulab.store.lookup import Entry
from gpulab.store.runs import Figures, Runs
from gpulab.views.html import plain_table
from gpulab.views.text import aligned
from gpulab.views.view import Answer
from gpulab.views.wording import cut, plain, rank_words, shortened

SHOWN = 20
WIDEST_NAME = 32
WIDEST_ASKED = 200
TITLES = ("", "name", "id", "started", "step", "steps", "took", "device", "outcome")
_NUMBERS = ("", "step", "steps", "took")
_NAMED = 20  # runs listed before a deletion
_WIDEST_NAME = 40


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
    changed = settings_words(run.settings.knobs)
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


def figures() -> Figures:
    """What an exported row holds; to list runs takes none of it."""
    from gpulab.analysis.run_row import COLUMNS, run_row

    return Figures(COLUMNS, run_row)


def runs_in(store: Store | None) -> Runs:
    """The runs of a store, the default one where None."""
    collection = Runs(store)
    collection.show_with(text, html)
    collection.export_with(figures)
    return collection


runs = runs_in(None)  # and those of this process


def list_runs(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs`. Raises UsageError where the first word was to be a verb, StoreError."""
    chosen = _chosen(options, options.words)
    if options.words and not len(chosen):
        meant = difflib.get_close_matches(options.words[0][:100], ("name", "delete", "export"), n=1, cutoff=0.7)
        if meant:
            words = cut(" ".join(options.words), 100)
            raise UsageError(f"No run has the words {words!r}. Did you mean `{options.prog} {meant[0]}`?")
    return Answer(Table(chosen, None if options.all else SHOWN))


def name_run(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs name`. Raises UsageError and StoreError."""
    if len(options.words) != 2:
        raise UsageError(f"{options.prog} expects a run and its new name; quote names with spaces.")
    run, new = options.words
    run_id = plain(runs_of(options).name(run, new))
    return Answer(f"{run_id} has the name {_short(new)!r}." if new else f"{run_id} has no name now.")


def delete_runs(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs delete`. Raises UsageError and StoreError."""
    chosen = _chosen(options)
    if bool(options.keys) == bool(chosen.conditions):
        raise UsageError(f"{options.prog} expects runs or a filter, {'not both' if options.keys else 'at least one'}.")
    if not options.keys and not len(chosen):
        return Answer(f"No run matches: {_short(chosen.conditions)}. Nothing to delete.")
    deletions = chosen.delete(*options.keys) if options.yes else chosen.deletions(*options.keys)
    counted = f"{plural(len(deletions), 'run')}, {size(sum(d.size_bytes for d in deletions))}."
    first = f"Deleted {counted}" if options.yes else f"Would delete {counted} Nothing is deleted yet: add --yes."
    lines = []
    for d in deletions[:_NAMED]:
        on_disk = size(d.size_bytes) if d.path is not None else "not saved"
        lines.append(f"  {plain(d.id)}  {_short(d.name) if d.name != d.id else '–'}  {on_disk}")
    if len(deletions) > _NAMED:
        lines.append(f"  … and {len(deletions) - _NAMED:,} more")
    return Answer("\n".join([first, *lines]))


def export_runs(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs export`. Raises UsageError and StoreError."""
    if len(options.file) + (options.tensorboard is not None) != 1:
        raise UsageError(f"{options.prog} expects one target: FILE.csv, .json or .parquet, or --tensorboard FOLDER.")
    chosen = _chosen(options)
    done = chosen.export(options.file[0]) if options.file else chosen.export_tensorboard(options.tensorboard)
    lines = [f"{plural(done.count, 'run')} written to {plain(str(done.path))}"]
    lines += [f"  {plain(line)}" for line in (*(f"left out: {why}" for why in done.skipped), *done.notes)]
    if options.tensorboard is not None:
        lines.append(f"Look at them: tensorboard --logdir {plain(options.tensorboard)}")
    return Answer("\n".join(lines))


def runs_of(options: argparse.Namespace) -> Runs:
    """Those of the store that `--store` names, else all that this process finds."""
    return runs if options.store is None else runs_in(Store(options.store))


def _chosen(options: argparse.Namespace, words: Sequence[str] = ()) -> Runs:
    return runs_of(options).where(
        name=options.name,
        device=options.device,
        since=options.since,
        outcome=options.outcome,
        words=[*words, *options.text.split()],
    )


def _short(name: str) -> str:
    return cut(plain(name), _WIDEST_NAME)
