"""`gpulab runs`: lists, filters, names, deletes and exports the stored runs and the runs of this process.

In Python, `gpulab.runs` has the same functions as methods.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from gpulab.api.runs import MOST_ROWS, Runs, runs
from gpulab.errors import UsageError
from gpulab.formatting import plural, size
from gpulab.store.folders import Store
from gpulab.views.view import Answer
from gpulab.views.wording import cut, plain

_LISTED = 20  # runs listed before a deletion
_WIDEST_NAME = 40


def list_runs(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs`. Raises StoreError, and UsageError if the first word looks like a misspelt verb."""
    selection = _selection(options, options.words)
    if options.words and not len(selection):
        near = difflib.get_close_matches(options.words[0][:100], ("name", "delete", "export"), n=1, cutoff=0.7)
        if near:
            words = cut(" ".join(options.words), 100)
            raise UsageError(f"No run has the words {words!r}. Did you mean `{options.prog} {near[0]}`?")
    return Answer(selection.listing(None if options.all else MOST_ROWS))


def name_run(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs name`. Raises UsageError and StoreError."""
    if len(options.words) != 2:
        raise UsageError(f"{options.prog} expects a run and its new name; quote names with spaces.")
    run, new = options.words
    run_id = plain(runs_of(options).name(run, new))
    return Answer(f"{run_id} has the name {_short(new)!r}." if new else f"{run_id} has no name now.")


def delete_runs(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs delete`. Raises UsageError and StoreError."""
    selection = _selection(options)
    if bool(options.keys) == bool(selection.conditions):
        raise UsageError(f"{options.prog} expects runs or a filter, {'not both' if options.keys else 'at least one'}.")
    if not options.keys and not len(selection):
        return Answer(f"No run matches: {_short(selection.conditions)}. Nothing to delete.")
    deletions = selection.delete(*options.keys) if options.yes else selection.deletions(*options.keys)
    total = f"{plural(len(deletions), 'run')}, {size(sum(d.size_bytes for d in deletions))}."
    first = f"Deleted {total}" if options.yes else f"Would delete {total} Nothing is deleted yet: add --yes."
    lines = []
    for d in deletions[:_LISTED]:
        on_disk = size(d.size_bytes) if d.path is not None else "not saved"
        lines.append(f"  {plain(d.id)}  {_short(d.name) if d.name != d.id else '–'}  {on_disk}")
    if len(deletions) > _LISTED:
        lines.append(f"  … and {len(deletions) - _LISTED:,} more")
    return Answer("\n".join([first, *lines]))


def export_runs(options: argparse.Namespace) -> Answer:
    """Do `gpulab runs export`. Raises UsageError and StoreError."""
    if len(options.file) + (options.tensorboard is not None) != 1:
        raise UsageError(f"{options.prog} expects one target: FILE.csv, .json or .parquet, or --tensorboard FOLDER.")
    selection = _selection(options)
    done = selection.export(options.file[0]) if options.file else selection.export_tensorboard(options.tensorboard)
    lines = [f"{plural(done.count, 'run')} written to {plain(str(done.path))}"]
    lines += [f"  {plain(line)}" for line in (*(f"left out: {why}" for why in done.skipped), *done.notes)]
    if options.tensorboard is not None:
        lines.append(f"Look at them: tensorboard --logdir {plain(options.tensorboard)}")
    return Answer("\n".join(lines))


def runs_of(options: argparse.Namespace) -> Runs:
    """The runs of the store that `--store` names, else of the default store and this process."""
    return runs if options.store is None else Runs(Store(options.store))


def _selection(options: argparse.Namespace, words: Sequence[str] = ()) -> Runs:
    return runs_of(options).where(
        name=options.name,
        device=options.device,
        since=options.since,
        outcome=options.outcome,
        words=[*words, *options.text.split()],
    )


def _short(name: str) -> str:
    return cut(plain(name), _WIDEST_NAME)
