"""The words of the command line: commands, their options, and a sentence for each mistake."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gpulab.errors import UsageError
from gpulab.lessons.editions import EDITIONS, FOLDER
from gpulab.options import (
    DEFAULT_BUDGET_S,
    add_only_ranks,
    add_run_options,
    add_whole_number,
    seconds_type,
    share_type,
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
            raise UsageError(f"{missing.split(',')[0]} is missing. Usage: `{usage}`.")
        raise UsageError(f"{message}. See `{self.prog} --help`.")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; `do` names the module and the function that does it. Raises UsageError."""
    parser, commands = _parsers()
    if argv and not argv[0].startswith("-") and argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], list(commands), n=1)
        hint = (
            f"Did you mean {near[0]!r}?" if near else f"A notebook may have `%gpulab {argv[0]}`; see `gpulab --help`."
        )
        raise UsageError(f"There is no command {argv[0]!r}. {hint}")
    options, rest = parser.parse_known_args(argv)
    if rest:
        chosen = commands[options.command] if options.command else parser
        raise UsageError(_unknown(rest[0], argv, chosen))
    if options.version:
        options.do = ("gpulab.cli.output", "print_version")
    elif options.command is None:
        parser.error("a command is missing: " + ", ".join(commands))
    return options


def _unknown(argument: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"Unexpected argument {argument!r}. See `{parser.prog} --help`."
    from gpulab.api.arguments import unknown_option

    return unknown_option(parser.prog, argument, argv, parser._option_string_actions)


def _parsers() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(prog="gpulab", description="Find out why a GPU idles.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.set_defaults(command=None)
    group = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    add: list[tuple[str, str, str, Callable[[argparse.ArgumentParser], None]]] = [
        ("record", "profile a script", "record.record", _record_options),
        (
            "report",
            "print the report of a stored run, a trace file or a folder of traces",
            "stored.print_report",
            _report_options,
        ),
        (
            "compare",
            "compare stored runs or traces with the first one",
            "stored.print_comparison",
            _compare_options,
        ),
        ("runs", "list, filter, rename, delete and export the stored runs", "", _store_option),
        (
            "watch",
            "show the ranks of a running job live: which rank waits for which",
            "watch.watch_job",
            _watch_options,
        ),
        ("fleet", "show which jobs waste GPUs, and why, across folders of runs", "", _store_option),
        ("tensorboard", "open the stored runs in TensorBoard with torch-tb-profiler", "", _store_option),
        (
            "lab",
            "copy the guided lessons into your own folder and open them in JupyterLab",
            "lab.open_lessons",
            _lab_options,
        ),
        (
            "doctor",
            "check what gpulab can measure on this machine, and why not the rest",
            "doctor.print_examination",
            _store_option,
        ),
    ]
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, purpose, do, add_options in add:
        sentence = f"{purpose[0].upper()}{purpose[1:]}."
        command = group.add_parser(name, help=purpose, description=sentence, allow_abbrev=False)
        module, _, function = do.rpartition(".")
        command.set_defaults(command=name, do=(f"gpulab.cli.{module}", function))
        add_options(command)
        commands[name] = command
    return parser, commands


def _lab_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpulab lab [options] [-- JUPYTERLAB OPTIONS ...]"
    parser.add_argument("--lesson", default="00", metavar="NN", help="open this lesson (default: 00, the quick start)")
    parser.add_argument(
        "--folder", type=Path, default=Path(FOLDER), help=f"where your copies go (default: {FOLDER} in this folder)"
    )
    parser.add_argument(
        "--edition",
        choices=EDITIONS,
        default="self-study",
        help="solutions collapsed (self-study), left out (class), or filled in (instructor)",
    )
    parser.add_argument("--no-open", action="store_true", help="copy only, do not open JupyterLab")
    parser.add_argument("args", nargs="*", metavar="JUPYTERLAB OPTIONS", help="e.g. -- --no-browser --allow-root")


def _record_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "gpulab record [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--name", default="", help="a name for the run (default: the script's)")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="run with this setting changed")
    parser.add_argument(
        "--ab",
        action="append",
        metavar="NAME=VALUE",
        help="compare the changed script with the unchanged one, the baseline",
    )
    add_whole_number(parser, "--pairs", 1, "with --ab: pairs of blocks to measure (default: as many as fit the budget)")
    parser.add_argument(
        "--budget",
        type=seconds_type("--budget"),
        metavar="SECONDS",
        help=f"with --ab: total time of the comparison (default: {DEFAULT_BUDGET_S:g})",
    )
    add_whole_number(parser, "--ranks", 1, "run the script in N processes, as torchrun does, and report on all ranks")
    add_only_ranks(parser)
    add_run_options(parser, "script")
    parser.set_defaults(device="auto")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the report as one self-contained page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    _all_option(parser)
    # a cell that runs in several ranks: what it reads of its notebook, and no report by the ranks themselves
    parser.add_argument("--before", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--silent", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--with-launcher", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="the Python file to run; after -m a module")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        nargs="?",
        default="latest",
        metavar="RUN",
        help="a run by id (or a prefix of it), name, folder, or -1 for the newest (default). Or a torch.profiler "
        "trace (.json, .json.gz), or a folder with one trace per rank",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one self-contained page")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    _all_option(parser)
    _store_option(parser)


def _watch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="its id (default: the job that started last)")
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
        "--price-per-hour", type=_price, metavar="X", help="price of the machine: adds the cost per million samples"
    )
    parser.add_argument(
        "--fail-if-slower",
        type=share_type("--fail-if-slower"),
        metavar="SHARE",
        help="for CI: exit with status 1 if a run is slower than the first by more than this, e.g. 5%%",
    )
    _store_option(parser)


def _store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", type=Path, metavar="DIR", help="folder of the runs (default: $GPULAB_DIR/runs, else .gpulab/runs)"
    )


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise argparse.ArgumentTypeError(f"the price must be a number > 0, got {text!r}")
    return price
