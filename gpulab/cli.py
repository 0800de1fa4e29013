"""The command line: parse, do, show, with one place that turns our errors into one line and exit status 2."""

from __future__ import annotations

import argparse
import builtins
import difflib
import importlib.machinery
import importlib.util
import io
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

import gpulab
from gpulab.api import doctor, runs_command, tensorboard
from gpulab.api.profile import open_run
from gpulab.devices.doctor import examine
from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.formatting import plural
from gpulab.lessons.catalogue import lesson_named
from gpulab.lessons.editions import EDITIONS
from gpulab.lessons.own_folder import FOLDER, copy_lessons, jupyterlab_command, sign
from gpulab.options import add_run_options
from gpulab.store.folders import Store
from gpulab.user_code import runs_users_code
from gpulab.views import wording
from gpulab.views.comparison.comparison import Compared
from gpulab.views.report.ranks import RankedReport
from gpulab.views.report.report import Report
from gpulab.views.running.waiting import waiting

runs_users_code(__file__)

USAGE_STATUS = 2
INTERRUPTED_STATUS = 130
BROKEN_PIPE_STATUS = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Do one command; returns the exit status. Of `record`, it is the script's own."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] in (["runs"], ["tensorboard"]):  # they read their own words, as their magics do
            return _worded(given[0], given[1:])
        options = _parse(given)
        do: Callable[[argparse.Namespace], int] = options.do
        return do(options)
    except GpulabError as e:
        _complain(str(e))
        return USAGE_STATUS
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_STATUS


def write_whole(path: Path, content: str) -> None:
    """Write a text file whole or not at all. Raises StoreError with the reason."""
    if not path.name or path.is_dir():
        raise StoreError(f"{str(path)!r} is a folder: name a file in it.")
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(3)}")
    try:
        unfinished.write_text(content, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as e:
        raise StoreError(f"{str(path)!r} cannot be written: {e.strerror or e}.") from e
    finally:
        unfinished.unlink(missing_ok=True)


# report, runs, doctor


def _report(options: argparse.Namespace) -> int:
    with waiting(f"reading {wording.plain(str(options.run))}"):
        report = gpulab.report(open_run(options.run, Store(options.store)))
        shown = _as_json(report) if options.json else ""
        if options.html is not None:
            write_whole(options.html, report.html())
        elif not options.json:
            shown = report.text(full=options.all)
    if shown:
        _print(shown)
    else:
        _print(f"The report is in {wording.plain(str(options.html))}\n")
    return 0


def _compare(options: argparse.Namespace) -> int:
    store = Store(options.store)
    with waiting("reading " + wording.plain(", ".join(map(str, options.runs)))):
        opened = [open_run(run, store) for run in options.runs]
        compared = gpulab.compare(*opened, price_per_hour=options.price_per_hour)
    if options.html is not None:
        write_whole(options.html, compared.html())
        _print(f"The comparison is in {wording.plain(str(options.html))}\n")
    else:
        _print(_as_json(compared) if options.json else compared.text(full=options.all))
    return 0


def _worded(name: str, rest: Sequence[str]) -> int:
    if name == "runs":
        _print(runs_command.terminal(rest))
    else:
        tensorboard.terminal(rest)
    return 0


def _listed(options: argparse.Namespace) -> int:
    """Only for the help: `main` has passed the words on."""
    return 0


def _doctor(options: argparse.Namespace) -> int:
    with waiting("looking at this machine"):
        examined = doctor.render(examine(Store(options.store).root))
    _print(examined)
    return 0


def _lab(options: argparse.Namespace) -> int:
    entry = lesson_named(options.lesson)
    copied = copy_lessons(options.folder.absolute(), options.edition)
    sign(copied)
    folder = wording.plain(str(copied.folder))
    if copied.new:
        _print(f"{plural(len(copied.new), 'lesson')} copied to {folder}\n")
    if copied.kept:
        _print(f"{plural(len(copied.kept), 'lesson')} in {folder} left as they are: they are yours\n")
    if options.no_open:
        return 0
    command = jupyterlab_command(copied.folder, entry.name, options.args)
    _print(f"Opening JupyterLab on lesson {entry.number}. Ctrl+C twice ends it.\n")
    try:
        return subprocess.call(command, cwd=copied.folder)
    except KeyboardInterrupt:
        return 0


def _version(options: argparse.Namespace) -> int:
    _print(f"gpulab {gpulab.__version__}\n")
    return 0


def _as_json(report: Report | RankedReport | Compared) -> str:
    return json.dumps(report.json(), indent=2, allow_nan=False) + "\n"


def _print(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no "µ" still shows the rest
    sys.stdout.write(text)
    sys.stdout.flush()


def _complain(text: str) -> None:
    print(f"gpulab: {wording.plain(text)}", file=sys.stderr)


# record


def _record(options: argparse.Namespace) -> int:
    script = _Script(options.script, options.args)
    for path in (options.html, options.json):
        _require_folder(path)
    terminal = sys.stderr  # the script may redirect it
    raised: BaseException | None = None
    profiled = gpulab.profile(
        options.name,
        steps=options.steps,
        warmup=options.warmup,
        trace_steps=options.trace_steps,
        trace=not options.no_trace,
        whole=options.whole,
        live=not options.no_live,
        save=not options.no_save,
        device=options.device,
        show=False,
        source="script",
        code=script.text,
    )
    try:
        with profiled:
            script.run()
    except BaseException as e:
        if e is not script.raised:
            raise
        raised = e
    sys.stdout.flush()
    shown = _show_recorded(profiled.report, options, terminal)
    return script.status(raised) or shown


def _show_recorded(report: Report, options: argparse.Namespace, terminal: TextIO) -> int:
    terminal.write("\n" + report.text(full=options.all))
    terminal.flush()
    try:
        if options.html is not None:
            write_whole(options.html, report.html())
        if options.json is not None:
            write_whole(options.json, _as_json(report))
    except StoreError as e:
        _complain(str(e))
        return USAGE_STATUS
    return 0


class _Script:
    """A Python file, run in this process as `python file` would run it.

    Nothing is put back afterwards: the script's threads and exit handlers still need their `__main__`.
    """

    def __init__(self, path: str, args: Sequence[str]) -> None:
        try:
            self._source = Path(path).read_bytes()
        except OSError as e:
            raise UsageError(f"The script {path!r} cannot be opened: {e.strerror or e}.") from e
        self._path = path
        self._args = args
        self._main = ModuleType("__main__")
        self.raised: BaseException | None = None

    @property
    def text(self) -> str:
        """The script's text; empty where its encoding is wrong, which running it will say."""
        try:
            return importlib.util.decode_source(self._source)
        except (SyntaxError, UnicodeDecodeError):
            return ""

    def run(self) -> None:
        """Run to its end, of which a clean `sys.exit` is one. What else it raises is kept in `raised` and raised on."""
        absolute = os.path.abspath(self._path)
        self._main.__file__ = absolute  # the spawned workers of a DataLoader find their __main__ by it
        self._main.__loader__ = importlib.machinery.SourceFileLoader("__main__", absolute)
        self._main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._main
        sys.argv = [self._path, *self._args]
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(self._path))
        try:
            exec(compile(self._source, absolute, "exec", dont_inherit=True), self._main.__dict__)
        except BaseException as e:
            if isinstance(e, SystemExit) and e.code in (None, 0):
                return
            self.raised = e
            raise

    def status(self, raised: BaseException | None) -> int:
        """The exit status Python would give; shows the traceback as Python does (`profile` took our frames out)."""
        if raised is None:
            return 0
        if isinstance(raised, SystemExit):
            return _exit_status(raised)
        sys.excepthook(type(raised), raised, raised.__traceback__)
        return INTERRUPTED_STATUS if isinstance(raised, KeyboardInterrupt) else 1


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _require_folder(path: Path | None) -> None:
    if path is not None and (not path.name or path.is_dir()):
        raise UsageError(f"{str(path)!r} is a folder: name a file in it.")
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")


# options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
            raise UsageError(f"{missing.split(',')[0]} is missing. Write `{usage}`.")
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        raise UsageError(f"There is no command {argv[0]!r}; the nearest is {_nearest(argv[0], commands)!r}.")
    options, rest = parser.parse_known_args(argv)
    if rest:
        chosen = commands[options.command] if options.command else parser
        raise UsageError(_unknown(rest[0], chosen))
    if options.version:
        options.do = _version
    elif options.command is None:
        parser.error("a command is missing: " + ", ".join(commands))
    return options


def _unknown(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"{argument!r} is one argument too many. See `{parser.prog} --help`."
    name = argument.partition("=")[0]
    valid = [option for action in parser._actions for option in action.option_strings]
    return f"`{parser.prog}` has no option {name!r}; the nearest is {_nearest(name, valid)!r}."


def _nearest(word: str, valid: Sequence[str] | dict[str, argparse.ArgumentParser]) -> str:
    return difflib.get_close_matches(word, list(valid), n=1, cutoff=0.0)[0]


def _parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(prog="gpulab", description="See why a GPU idles.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(command=None)
    group = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    add: list[tuple[str, str, Callable[[argparse.Namespace], int], Callable[[argparse.ArgumentParser], None]]] = [
        ("record", "run a script and profile it", _record, _record_options),
        (
            "report",
            "print the report of a stored run, of a trace file or of a folder of traces",
            _report,
            _report_options,
        ),
        ("compare", "compare the first stored run or trace with each of the others", _compare, _compare_options),
        ("runs", "list, filter, rename, delete and export the stored runs", _listed, _store_option),
        ("tensorboard", "open the stored runs in TensorBoard with torch-tb-profiler", _listed, _store_option),
        ("lab", "copy the guided lessons into a folder of yours and open JupyterLab there", _lab, _lab_options),
        ("doctor", "say what this machine can measure, and why it cannot measure the rest", _doctor, _store_option),
    ]
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, purpose, do, add_options in add:
        command = group.add_parser(name, help=purpose, description=purpose.capitalize() + ".", allow_abbrev=False)
        command.set_defaults(command=name, do=do)
        add_options(command)
        commands[name] = command
    return parser, commands


def _lab_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpulab lab [options] [-- JUPYTERLAB OPTIONS ...]"
    parser.add_argument("--lesson", default="00", metavar="NN", help="open this lesson (default: 00, the quick start)")
    parser.add_argument(
        "--folder", type=Path, default=Path(FOLDER), help=f"where your copies are (default: {FOLDER} in this folder)"
    )
    parser.add_argument(
        "--edition",
        choices=EDITIONS,
        default="self-study",
        help="solutions hidden behind a line (self-study), left out (class), or filled in (instructor)",
    )
    parser.add_argument("--no-open", action="store_true", help="only copy them")
    parser.add_argument("args", nargs="*", metavar="JUPYTERLAB OPTIONS", help="such as -- --no-browser --allow-root")


def _record_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpulab record [options] SCRIPT [ARGS ...]"
    parser.add_argument("--name", default="", help="a name for the run; without it the run has only its id")
    add_run_options(parser, "script")
    parser.set_defaults(device="auto")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one self-contained page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    _all_option(parser)
    parser.add_argument("script", metavar="SCRIPT", help="the Python file to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="a run: its id or the beginning of it, its name, its folder, or -1 for the newest (default); or a trace "
        "that torch.profiler wrote (.json, .json.gz), or a folder of them, one per rank",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    _all_option(parser)
    _store_option(parser)


def _all_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="print everything, not only the first 25 lines")


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="two or more runs or traces, as for `gpulab report`")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--html", type=Path, metavar="FILE", help="write the comparison as one self-contained page")
    shape.add_argument("--json", action="store_true", help="print the figures as JSON")
    _all_option(parser)
    parser.add_argument(
        "--price-per-hour", type=_price, metavar="X", help="price of the machine: adds the cost of a million samples"
    )
    _store_option(parser)


def _store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="where the runs are (default $GPULAB_DIR/runs, else .gpulab/runs)"
    )


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a price: a number above 0")
    return price


if __name__ == "__main__":
    sys.exit(main())
