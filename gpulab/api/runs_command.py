"""`%gpulab runs …` and `gpulab runs …`: list, filter, name, delete and export what was measured.

`magic` is the line magic, `terminal` the command line; Python has the same as methods of `gpulab.runs`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence

from gpulab.api.arguments import Parser, split, take_store
from gpulab.api.runs_table import SHOWN, Table
from gpulab.errors import UsageError
from gpulab.formatting import plural, size
from gpulab.store.runs import Deletion, Exported, Figures, Runs
from gpulab.views.wording import cut, plain

HELP = """\
{prog} [WORD …] [CONDITION …] [--all]   the newest {shown} runs, or all; with words: the runs that contain them
{prog} name RUN NEW                     rename a run
{prog} delete RUN … | CONDITION … [--yes]   show what would be deleted; with --yes, delete it
{prog} export FILE [CONDITION …]        one row per run: .csv, .json or .parquet
{prog} export --tensorboard FOLDER      curves as TensorBoard scalars

RUN: an id or a prefix of it, a name, -1 for the newest, latest, or a run's folder.
CONDITION: --name 'resnet*', --device cpu|cuda, --since 2026-11-20 or 30m, 2h, 3d, 1w,
           --outcome completed|stopped|interrupted|failed, --text WORD"""

_NAMED = 20  # runs listed before a deletion
_WIDEST_NAME = 40


def magic(runs: Runs, line: str) -> None:
    """Do what the rest of the line after `%gpulab runs` asks and show it. Raises UsageError and StoreError."""
    shown = command(runs, split(line, "%gpulab runs"), "%gpulab runs")
    if isinstance(shown, Table):
        from IPython.display import display

        display(shown)  # type: ignore[no-untyped-call]
    else:
        print(shown)


def terminal(words: Sequence[str], prog: str = "gpulab runs") -> str:
    """The same for a terminal: text, of the store that `--store DIR` names. Raises UsageError and StoreError."""
    store, rest = take_store(words, prog)
    return f"{command(Runs(store), rest, prog)}\n"


def command(runs: Runs, words: Sequence[str], prog: str = "gpulab runs") -> str | Table:
    """Do what the words ask; returns what is to be shown. Raises UsageError and StoreError."""
    if any(word in ("-h", "--help") for word in words):
        return HELP.format(prog=prog, shown=SHOWN)
    if words and words[0] in _VERBS:
        return _VERBS[words[0]](runs, words[1:], f"{prog} {words[0]}")
    parser = Parser(prog, "[WORD …] [CONDITION …] [--all]")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--all", action="store_true")
    _add_conditions(parser)
    options = parser.read(words)
    chosen = _chosen(runs, options, options.words)
    if options.words and not len(chosen):
        meant = difflib.get_close_matches(options.words[0][:100], list(_VERBS), n=1, cutoff=0.7)
        if meant:
            raise UsageError(
                f"No run has the words {cut(' '.join(options.words), 100)!r}. Did you mean `{prog} {meant[0]}`?"
            )
    return Table(chosen, None if options.all else SHOWN)


def _name(runs: Runs, words: Sequence[str], prog: str) -> str:
    parser = Parser(prog, "RUN NEW")
    parser.add_argument("words", nargs="*")
    given = parser.read(words).words
    if len(given) != 2:
        raise UsageError(f"{prog} expects a run and its new name; quote names with spaces.")
    run_id = runs.name(given[0], given[1])
    return f"{plain(run_id)} has the name {_short(given[1])!r}." if given[1] else f"{plain(run_id)} has no name now."


def _delete(runs: Runs, words: Sequence[str], prog: str) -> str:
    parser = Parser(prog, "RUN … | CONDITION … [--yes]")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--yes", action="store_true")
    _add_conditions(parser)
    options = parser.read(words)
    chosen = _chosen(runs, options, ())
    if bool(options.keys) == bool(chosen.conditions):
        raise UsageError(f"{prog} expects runs or a filter, {'not both' if options.keys else 'at least one'}.")
    if not options.keys and not len(chosen):
        return f"No run matches: {_short(chosen.conditions)}. Nothing to delete."
    if options.yes:
        return _deletion_words("Deleted", chosen.delete(*options.keys), "")
    return _deletion_words("Would delete", chosen.deletions(*options.keys), " Nothing is deleted yet: add --yes.")


def _deletion_words(what: str, deletions: Sequence[Deletion], more: str) -> str:
    total = size(sum(d.size_bytes for d in deletions))
    lines = []
    for d in deletions[:_NAMED]:
        on_disk = size(d.size_bytes) if d.path is not None else "not saved"
        lines.append(f"  {plain(d.id)}  {_short(d.name) if d.name != d.id else '–'}  {on_disk}")
    if len(deletions) > _NAMED:
        lines.append(f"  … and {len(deletions) - _NAMED:,} more")
    return "\n".join([f"{what} {plural(len(deletions), 'run')}, {total}.{more}", *lines])


def _export(runs: Runs, words: Sequence[str], prog: str) -> str:
    parser = Parser(prog, "FILE | --tensorboard FOLDER [CONDITION …]")
    parser.add_argument("file", nargs="*")
    parser.add_argument("--tensorboard", metavar="FOLDER")
    _add_conditions(parser)
    options = parser.read(words)
    if len(options.file) + (options.tensorboard is not None) != 1:
        raise UsageError(f"{prog} expects one target: FILE.csv, .json or .parquet, or --tensorboard FOLDER.")
    chosen = _chosen(runs, options, ())
    chosen.export_with(figures())
    if options.file:
        return _written(chosen.export(options.file[0]))
    written = _written(chosen.export_tensorboard(options.tensorboard))
    return f"{written}\nLook at them: tensorboard --logdir {plain(options.tensorboard)}"


def figures() -> Figures:
    """What an exported row holds; to list runs takes none of it."""
    from gpulab.analysis.run_row import COLUMNS, run_row

    return Figures(COLUMNS, run_row)


def _written(done: Exported) -> str:
    first = f"{plural(done.count, 'run')} written to {plain(str(done.path))}"
    left_out = [f"left out: {why}" for why in done.skipped]
    return "\n".join([first, *(f"  {plain(line)}" for line in (*left_out, *done.notes))])


def _add_conditions(parser: Parser) -> None:
    for name in ("--name", "--device", "--since", "--outcome", "--text"):
        parser.add_argument(name, default="")


def _chosen(runs: Runs, options: argparse.Namespace, words: Sequence[str]) -> Runs:
    return runs.where(
        name=options.name,
        device=options.device,
        since=options.since,
        outcome=options.outcome,
        words=[*words, *options.text.split()],
    )


def _short(name: str) -> str:
    return cut(plain(name), _WIDEST_NAME)


_VERBS: Mapping[str, Callable[[Runs, Sequence[str], str], str]] = {
    "name": _name,
    "delete": _delete,
    "export": _export,
}
