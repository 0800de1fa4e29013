"""The magics: parse the line, profile the cell, show what came out."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from IPython.core.completer import CompletionContext, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError as LineError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from msgspec import Struct
from traitlets import Bool, Int, Unicode

from gpulab.capture import threads
from gpulab.errors import GpulabError, RankError, UsageError
from gpulab.options import (
    DEFAULT_BUDGET_S,
    FURTHER_BUDGET_S,
    add_only_ranks,
    add_run_options,
    add_whole_number,
    check_only_ranks,
    seconds_type,
    without_comment,
)
from gpulab.tuning import cell_code
from gpulab.tuning.cell_code import Interrupted
from gpulab.user_code import hide_gpulabs_frames, runs_users_code

if TYPE_CHECKING:
    from gpulab.api.cell_ranks import RankedCell
    from gpulab.api.profile import profile
    from gpulab.api.ranked_experiment import RankedExperiment, RanksSweep
    from gpulab.knobs.observer import Observed
    from gpulab.run import Ranks
    from gpulab.tuning.code import TextCode
    from gpulab.tuning.execute import Changing
    from gpulab.tuning.plan import Code, Plan, PlanRequest
    from gpulab.views.comparison import Compared, ScalingView

runs_users_code(__file__)

_EPILOG = """\
examples:
  %%gpuprofile                       above a training cell: profile it
  %%gpuprofile baseline --steps 50   name the run, stop the cell cleanly after 50 steps
  %gpuprofile trainer.train()        one line of code
  run = %gpuprofile -r train()       and return the run
  %%gpuprofile --set workers=4       run the cell with this setting changed
  %%gpuprofile --ab workers=4        baseline against the changed cell, interleaved: which is faster?
  %%gpuprofile --sweep batch_size=8,16,32,64

The cell behaves as it does without the magic. The run is saved in .gpulab/runs and is also gpulab.runs[-1].
--ab and --sweep run the cell many times, a few steps each. Before each run and at the end they restore weights,
optimizer state, RNG state and data order. These runs stop inside the loop, so code after the loop does not run.
Files that the cell writes are not restored. The comparison is also gpulab.experiments[-1].
{settings}
%config GPUProfile lists the defaults; %config GPUProfile.steps = 50 sets one."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving Python, and names the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%gpuprofile: {message}. `%gpuprofile --help` has examples.")


def _parser() -> _Parser:
    parser = _Parser(
        prog="%%gpuprofile",
        description="Profile a training cell: a live view while it runs, then a report with a step breakdown.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", nargs="?", default="", metavar="NAME", help="a name for the run")
    add_run_options(parser, "cell")
    add("--set", action="append", metavar="NAME=VALUE", help="run with this setting changed; repeat for several")
    add(
        "--ab",
        action="append",
        metavar="NAME=VALUE",
        help="compare the changed cell with the unchanged one, the baseline",
    )
    add("--sweep", action="append", metavar="NAME=A,B,C", help="compare several values; two sweeps form a grid")
    add_whole_number(
        parser, "--pairs", 1, "pairs of blocks to measure (default: as many as fit the budget, at most 30)"
    )
    add(
        "--budget",
        type=seconds_type("--budget"),
        metavar="SECONDS",
        help=f"total time of a comparison (default: {DEFAULT_BUDGET_S:g}, plus {FURTHER_BUDGET_S:g} for each further "
        "setting); when it is used up, the result so far stands",
    )
    add_whole_number(parser, "--seeds", 0, "also run the baseline with N other seeds, to show how much the loss varies")
    add_whole_number(parser, "--ranks", 1, "run the cell in N new processes, as torchrun does, and report on all ranks")
    add_only_ranks(parser)
    add("--on", choices=("slurm",), help="run the ranks as a cluster job, submitted from a login node")
    add_whole_number(parser, "--nodes", 1, "number of cluster nodes (default: 1)")
    add_whole_number(parser, "--time", 1, "time limit of the cluster job in minutes (default: 10)")
    add("--sbatch", metavar="OPTIONS", help="options for sbatch, e.g. '--partition=gpu --gres=gpu:2'")
    add("--all", action="store_true", help="show the whole report, not only its first screen")
    add("-r", "--return", dest="give", action="store_true", help="return the run instead of the cell's value")
    add("-h", "--help", action="store_true", help="show this text")
    return parser


PARSER = _parser()
OPTIONS = sorted(PARSER._option_string_actions)
LOOKS_AT_MODULES = 5  # at the beginning, the loader, the first update and two backward passes: none in later epochs
_COMPARING = ("ab", "sweep")
_OF_COMPARISONS = ("pairs", "budget", "seeds")
_OF_CLUSTERS = ("nodes", "time", "sbatch")
_OF_EACH_RANK = ("only_ranks", "name", "steps", "warmup", "trace_steps", "no_trace", "whole", "set")


_WORD = re.compile(r"""(?:[^\s'"]|'[^']*(?:'|$)|"[^"]*(?:"|$))+""")  # with what stands in quotes


class Comparing(Struct, frozen=True):
    """An experiment that is ready to run."""

    code: Code
    plan: Plan
    give: bool
    full: bool = False

    def run(self) -> Compared | None:
        """Run and show it; what it found, where that was asked for."""
        from gpulab.api.experiment import conduct

        compared = conduct(self.code, self.plan, full=self.full)
        return compared if self.give else None


class Ranked(Struct, frozen=True):
    """A cell that is ready to run in several ranks."""

    cell: RankedCell | RankedExperiment | RanksSweep
    give: bool

    def run(self) -> Ranks | Compared | ScalingView | None:
        """Run and show it; what came of it, where that was asked for."""
        try:
            result = self.cell.run()
        except RankError:
            raise
        except GpulabError as e:
            raise LineError(str(e)) from None
        return result if self.give else None


_INNER = "%%gpuprofile inside a measured cell"


class Inner(Struct, frozen=True):
    """The code of a magic inside a cell that is measured: measured twice, neither figure would be right."""

    code: TextCode

    @classmethod
    def of(cls, options: argparse.Namespace, code: TextCode) -> Inner:
        """Raises UsageError where the magic asks for more than to measure."""
        asked = next((name for name in (*_COMPARING, "set", "ranks", "on") if getattr(options, name)), None)
        if asked is not None:
            raise UsageError(
                f"{_INNER} cannot take --{asked}: put one %%gpuprofile --{asked} on the cell's first line."
            )
        return cls(code)

    def run(self) -> object:
        """Run it as it is: what is around measures it."""
        sys.stderr.write(f"gpulab: {_INNER} is ignored: the outer one already measures this code.\n")
        return self.code.run()


def _sweeps_ranks(options: argparse.Namespace, code: TextCode) -> bool:
    """Whether the number of ranks is to be swept, which is no variable of the cell."""
    asks = any(word.partition("=")[0].strip() == "ranks" for word in options.sweep or ())
    return asks and not code.variables.has("ranks")


@contextmanager
def _observed() -> Iterator[Observed | None]:
    """What the cell inside uses, so that the bench opens with its values; None where torch is not imported yet."""
    if "torch" not in sys.modules:
        yield None
        return
    from gpulab.knobs.observer import observe

    with observe(times=LOOKS_AT_MODULES) as seen:
        yield seen


def _remember(code: Code, seen: Observed, profiler: profile) -> None:
    """What the cell has as written, where it came as far as to train. A fault of ours costs only the bench's values."""
    from gpulab.tuning import execute

    with suppress(Exception):
        if len(profiler.run.steps):
            execute.remember(code, seen.observation(profiler.run))


def _changing(options: argparse.Namespace, code: Code) -> Changing | None:
    """What `--set` asks for."""
    if not options.set:
        return None
    from gpulab.knobs.catalogue import parse_settings
    from gpulab.tuning.execute import Changing
    from gpulab.tuning.plan import Arm

    names = code.variables
    changing = Changing(Arm(parse_settings(options.set, names.has, names.names)), code)
    if changing.decided.refused:
        raise UsageError(f"{changing.decided.refused}.")
    return changing


def _check_combination(options: argparse.Namespace) -> None:
    """Raises UsageError for options that contradict each other."""
    comparing = [name for name in _COMPARING if getattr(options, name)]
    for name in _OF_COMPARISONS:
        if getattr(options, name) is not None and not comparing:
            raise UsageError(f"--{name} needs a comparison: add --ab NAME=VALUE or --sweep NAME=A,B,C.")
    elsewhere = "ranks" if options.ranks is not None else "on"
    if getattr(options, elsewhere) is not None and options.no_save:
        raise UsageError(f"--no-save and --{elsewhere} cannot be combined: drop one.")
    if options.only_ranks is not None and comparing:
        raise UsageError(f"--only-ranks and --{comparing[0]} cannot be combined: drop one.")
    check_only_ranks(options.only_ranks, (options.ranks or 1) if options.ranks is not None or options.on else None)
    for name in _OF_CLUSTERS:
        if options.on is None and getattr(options, name) is not None:
            raise UsageError(f"--{name} needs a cluster: add --on slurm.")
    of_one_run = {"--warmup": options.warmup, "--trace-steps": options.trace_steps, "--whole": options.whole or None}
    for option, given in of_one_run.items():
        if given is not None and comparing:
            raise UsageError(f"{option} and --{comparing[0]} cannot be combined: drop one.")


@magics_class
class GPUProfile(Magics):
    """Defaults of %%gpuprofile."""

    steps = Int(None, allow_none=True, help="Stop every profiled cell after this many steps.").tag(config=True)
    warmup = Int(None, allow_none=True, help="Warm-up steps excluded from the figures.").tag(config=True)
    trace_steps = Int(None, allow_none=True, help="Steps traced with the profiler.").tag(config=True)
    trace = Bool(True, help="Whether to trace a window of steps with the profiler.").tag(config=True)
    live = Bool(True, help="Whether to show the live view.").tag(config=True)
    save = Bool(True, help="Whether to keep runs on disk.").tag(config=True)
    device = Unicode("auto", help="The device to profile: auto, cpu, cuda, cuda:N.").tag(config=True)

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    def gpuprofile(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        value = None
        try:
            prepared = self._prepared(line, cell, local_ns)
            if prepared is None:
                print(help_text())
                return None
            if isinstance(prepared, Comparing):
                return prepared.run()
            if isinstance(prepared, Ranked | Inner):
                return prepared.run()
            parsed, code, profiler, changing, give = prepared
            try:
                with profiler:
                    if changing is not None:
                        with changing.applied() as changed:
                            value = changed.run()
                    else:
                        with _observed() as seen:
                            value = parsed.run(self.shell, local_ns)
            finally:
                _offer_bench(profiler)
            if changing is None and seen is not None:
                _remember(code, seen, profiler)
        except (LineError, Interrupted):
            raise
        except BaseException as error:
            hide_gpulabs_frames(error)
            if not threads.measures_here():
                cell_code.show_as_bare(self.shell, error)
            raise
        return profiler.run if give else value

    def _prepared(
        self, line: str, cell: str | None, local_ns: dict[str, Any] | None
    ) -> Comparing | Ranked | Inner | tuple[cell_code.Cell, Code, profile, Changing | None, bool] | None:
        """What to run, also as code that can run again, its profile, already started, and whether to return the run.

        None where help is asked for.
        Raises IPython's UsageError in one line, and SyntaxError as the cell alone would.
        """
        try:
            options, statement = self._read(line, cell)
            if statement is None:
                return None
            from gpulab.tuning.code import TextCode

            source: Literal["cell", "statement"] = "cell" if cell is not None else "statement"
            parsed = cell_code.parsed(self.shell, statement)
            give = options.give and not (parsed.silent and cell is not None)
            _check_combination(options)
            code = TextCode.of_cell(self.shell, statement, parsed, source, local_ns)
            if threads.measures_here():
                return Inner.of(options, code)
            if options.ranks is not None or options.on is not None or _sweeps_ranks(options, code):
                return self._ranked(options, code, parsed, give, local_ns)
            if any(getattr(options, name) for name in _COMPARING):
                from gpulab.tuning.runner import check

                plan = self._request(options).plan(code.variables)
                check(code, plan)
                return Comparing(code, plan, give, options.all)
            changing = _changing(options, code)
            profiler = self._profiler(options, statement, source, changing)
            profiler.start()
        except GpulabError as e:
            raise LineError(f"{_ended(str(e))}The {'statement' if cell is None else 'cell'} did not run.") from None
        return parsed, code, profiler, changing, give

    def _request(self, options: argparse.Namespace) -> PlanRequest:
        from gpulab.tuning.plan import PlanRequest

        return PlanRequest(
            ab=tuple(options.ab or ()),
            sweep=tuple(options.sweep or ()),
            set=tuple(options.set or ()),
            steps=options.steps,
            pairs=options.pairs,
            budget_s=options.budget,
            seeds=options.seeds or 0,
            name=options.name,
            device=options.device or self.device,
            trace=self.trace and not options.no_trace,
            save=self.save and not options.no_save,
        )

    def _ranked(
        self,
        options: argparse.Namespace,
        code: TextCode,
        parsed: cell_code.Cell,
        give: bool,
        local_ns: dict[str, Any] | None,
    ) -> Ranked:
        from gpulab.api.cell_ranks import RankedCell
        from gpulab.api.ranked_experiment import NAME, RanksSweep, counts_of

        counts = counts_of(options.sweep or []) if not code.variables.has(NAME) else None
        if counts is not None and (options.ab or options.seeds or options.no_save):
            raise UsageError("--sweep ranks=… only compares numbers of ranks: drop --ab, --seeds and --no-save.")
        if counts is not None and (options.ranks is not None or options.on is not None):
            raise UsageError("--sweep ranks=… sets the number of ranks on this machine: drop --ranks and --on.")
        given = {name: getattr(options, name) for name in _OF_EACH_RANK}
        for name in ("steps", "warmup", "trace_steps"):
            given[name] = getattr(self, name) if given[name] is None else given[name]
        given["no_live"] = options.no_live or not self.live
        given |= {"device": options.device or self.device, "no_trace": options.no_trace or not self.trace}
        given["no_trace"] = given["no_trace"] or counts is not None
        shell: Any = self.shell
        namespace = {**shell.user_ns, **(local_ns or {})}
        cells = [cell for cell in shell.user_ns.get("In", []) if isinstance(cell, str)]
        source = shell.transform_cell(code.text)
        asked = None
        ranks = options.ranks or 1
        if options.on is not None:
            from gpulab.launch.slurm import Allocation

            asked = Allocation(ranks, options.nodes or 1, options.time or Allocation(1).minutes, options.sbatch or "")
        ready = RankedCell.of(source, parsed.tree, namespace, cells, ranks, given, full=options.all, allocation=asked)
        if counts is not None:
            return Ranked(RanksSweep(ready, counts, options.pairs, options.budget, options.all), give)
        if not any(getattr(options, name) for name in _COMPARING):
            self._request(options).plan(code.variables)
            return Ranked(ready, give)
        from gpulab.api.ranked_experiment import RankedExperiment
        from gpulab.tuning.runner import check_plan

        request = self._request(options)
        plan = request.plan(code.variables)
        check_plan(plan)
        return Ranked(RankedExperiment(ready, request, plan, options.all), give)

    def _read(self, line: str, cell: str | None) -> tuple[argparse.Namespace, str | None]:
        """The options and the code; None where a bare `%gpuprofile` asks for help. Raises UsageError."""
        if cell is not None:
            options, code = parse(_words(without_comment(line))), cell
        else:
            options, code = split_statement(line)
        if options.help or (cell is None and not line.strip()):
            return options, None
        if not code.strip():
            raise UsageError("No code to profile: put it below %%gpuprofile, or after %gpuprofile.")
        return options, code

    def _profiler(
        self,
        options: argparse.Namespace,
        code: str,
        source: Literal["cell", "statement"],
        changing: Changing | None,
    ) -> profile:
        from gpulab.api.profile import profile

        asks_for_trace = options.trace_steps is not None or options.whole
        trace = not options.no_trace and (self.trace or asks_for_trace)
        return profile(
            options.name,
            steps=self.steps if options.steps is None else options.steps,
            warmup=self.warmup if options.warmup is None else options.warmup,
            trace_steps=self.trace_steps if trace and options.trace_steps is None else options.trace_steps,
            trace=trace,
            live=self.live and not options.no_live,
            save=self.save and not options.no_save,
            device=options.device or self.device,
            whole=options.whole,
            full=options.all,
            source=source,
            code=code,
            changes=None if changing is None else changing.changes,
            knobs=None if changing is None else {d.name: d.shown for d in changing.decided.names},
        )

    @no_var_expand
    @line_magic
    def gpulab(self, line: str) -> None:
        """A command on what was profiled here; %gpulab --help lists them."""
        command, _, rest = without_comment(line).strip().partition(" ")
        try:
            if command in _HELP_WORDS:
                print(COMMANDS_HELP)
            elif command in _ONE_LINE_HELP and rest.strip() in _HELP_WORDS:
                print(_ONE_LINE_HELP[command])
            else:
                command_named(command)(rest.strip())
        except GpulabError as e:
            raise LineError(str(e)) from None
        except Interrupted:
            raise
        except BaseException as error:
            if command in ("climb", "headspace"):  # it runs the user's cell: what that raises is shown as from the cell
                hide_gpulabs_frames(error)
                cell_code.show_as_bare(self.shell, error)
            raise


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read options. Raises UsageError in one line that names the word and the nearest valid one."""
    options, unknown = PARSER.parse_known_args(list(words))
    if unknown:
        word = unknown[0]
        if not word.startswith("-"):
            raise UsageError(f"A run has one name, got {options.name!r} and {word!r}. Quote a name with spaces.")
        from gpulab.api.arguments import unknown_option

        raise UsageError(unknown_option("%%gpuprofile", word, words, OPTIONS))
    return options


def split_statement(line: str) -> tuple[argparse.Namespace, str]:
    """Options up to the first word that is none, and the rest of the line untouched: a statement."""
    words: list[str] = []
    rest = line.lstrip()
    while rest.startswith("-") and not rest.startswith("- "):
        word, rest = _first_word(rest)
        words.append(word)
        action = PARSER._option_string_actions.get(word)
        if action is not None and action.nargs is None and action.metavar:
            value, rest = _first_word(rest)
            words.append(value)
    return parse(words), rest


def _first_word(line: str) -> tuple[str, str]:
    """The first word, its quotes taken off as a shell does, and the rest. Raises UsageError for an open quote."""
    match = _WORD.match(line)
    end = match.end() if match is not None else 0
    return "".join(_words(line[:end])), line[end:].lstrip()


def _ended(sentence: str) -> str:
    """Another sentence may follow; below a line of code it gets its own line."""
    if "\n    " in sentence and sentence.splitlines()[-1].startswith("    "):
        return f"{sentence}\n"
    return f"{sentence} " if sentence.endswith((".", "!", "?")) else f"{sentence}. "


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as e:
        raise UsageError(f"%%gpuprofile {line}: {str(e).lower()}.") from None


def _nothing_more(command: str, rest: str) -> None:
    if rest:
        raise UsageError(f"%gpulab {command} takes no further arguments: drop {rest!r}.")


def _offer_bench(profiler: profile) -> None:
    """Buttons under the report that open the bench and try the first fix; without them there is `%gpulab panel`."""
    from gpulab.views.live_view import in_notebook

    if in_notebook():
        with suppress(Exception):
            from gpulab.bench.opening import offer_bench

            offer_bench(dict(profiler.report.diagnosis.first.settings))


def _show_doctor(rest: str) -> None:
    _nothing_more("doctor", rest)
    from IPython.display import display

    from gpulab.api.doctor import Examination
    from gpulab.devices.doctor import examine
    from gpulab.views.waiting import waiting

    with waiting("checking this machine"):
        checks = examine()
    display(Examination(checks))  # type: ignore[no-untyped-call]


def _show_report(rest: str) -> None:
    words = _words(rest)
    full = "--all" in words
    rest = " ".join(word for word in words if word != "--all")
    from gpulab.api.reading import open_run, report, runs
    from gpulab.views.live_view import Stage

    if not len(runs):
        raise UsageError("No run yet: put %%gpuprofile above a training cell first.")
    Stage.open(live=False, full=full).show(report(open_run(rest or "-1")))


def _in(module: str, function: str = "magic", *, of_runs: bool = False, alone: str = "") -> Callable[[str], None]:
    """A command whose module is imported when it is given; it is about the kept runs, or `alone`, its own name."""

    def command(rest: str) -> None:
        if alone:
            _nothing_more(alone, rest)
        do = getattr(import_module(module), function)
        given = (import_module("gpulab.api.reading").runs,) if of_runs else ()
        do(*given, *(() if alone else (rest,)))

    return command


_COMMANDS: dict[str, Callable[[str], None]] = {
    "runs": _in("gpulab.api.runs_command", of_runs=True),
    "doctor": _show_doctor,
    "report": _show_report,
    "tensorboard": _in("gpulab.api.tensorboard", of_runs=True),
    "panel": _in("gpulab.bench.opening", "open_bench", alone="panel"),
    "apply": _in("gpulab.bench.opening", "apply_edit", alone="apply"),
    "climb": _in("gpulab.api.climb"),
    "headspace": _in("gpulab.api.headspace"),
    "predict": _in("gpulab.api.predict", "magic_predict"),
    "scoreboard": _in("gpulab.api.predict", "magic_scoreboard"),
    "progress": _in("gpulab.board.own", "show", alone="progress"),
    "board": _in("gpulab.board.live"),
    "fleet": _in("gpulab.api.fleet"),
}


_HELP_WORDS = ("-h", "--help")
_AT_A_TERMINAL = {"record", "watch", "compare", "lab"}
_ONE_LINE_HELP = {
    "doctor": "%gpulab doctor   what gpulab can measure on this machine, and why not the rest",
    "report": "%gpulab report [RUN] [--all]   show the report of the last run again, or of RUN (a name, an id or -1); "
    "--all: not only the first screen",
    "progress": "%gpulab progress   your guesses and exercises in the lessons of this folder",
    "board": "%gpulab board FOLDER [--html FILE]   live progress of the class in FOLDER, refreshed every few seconds; "
    "--html FILE: as a page; %gpulab board --stop ends it",
    "panel": "%gpulab panel   the bench of the last profiled cell: toggle settings, run, compare; needs a notebook",
    "apply": "%gpulab apply   the cell with the edit of the row open in the bench, as a new cell below",
}
COMMANDS_HELP = """\
%gpulab runs          list the stored runs
%gpulab report        show the report of a run again, or all of it
%gpulab predict       predict the speedup of a setting from the last run, without running it
%gpulab scoreboard    how accurate such predictions were on this machine
%gpulab climb         try promising settings on the last profiled cell one by one, keep what is faster
%gpulab headspace     the speedup of that cell with a perfect DataLoader
%gpulab panel         the bench of that cell: toggle settings, run, compare
%gpulab apply         the cell with the edit of the row open in the bench, as a new cell below
%gpulab fleet         which jobs waste GPUs, across folders of runs
%gpulab tensorboard   open the runs in TensorBoard
%gpulab doctor        what gpulab can measure on this machine
%gpulab progress      your guesses and exercises in the lessons
%gpulab board         the progress of a class, for its instructor

%gpulab COMMAND --help has details."""


def command_named(name: str) -> Callable[[str], None]:
    """A `%gpulab` command. Raises UsageError naming the nearest."""
    if name in _COMMANDS:
        return _COMMANDS[name]
    near = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.5)
    asked = f"%gpulab has no command {name!r}" if name else "%gpulab takes a command"
    more = f"Did you mean {near[0]}?" if name and near else "`%gpulab --help` explains them."
    if name in _AT_A_TERMINAL:
        more = f"At a terminal: gpulab {name}."
    raise UsageError(f"{asked}: {', '.join(_COMMANDS)}. {more}")


@context_matcher()  # type: ignore[untyped-decorator]
def complete(context: CompletionContext) -> SimpleMatcherResult:
    """For Tab in a magic's line: its options, commands, knobs and runs."""
    from gpulab.completion import LineCompletion

    return LineCompletion(PARSER, _COMMANDS).completions(context)


def help_text() -> str:
    """What `--help` prints: the options, examples, and every setting of the catalogue."""
    from gpulab.knobs.catalogue import KNOBS

    return _help(
        f"Settings: {', '.join(KNOBS)}, or any variable that the cell reads, or assigns a literal at its top level."
    )


def _help(settings: str) -> str:
    return f"{PARSER.format_help()}\n{_EPILOG.replace('{settings}', fill(settings, 116))}\n"


def register(shell: Any) -> None:
    """Make the magics known, their options completable."""
    magics = GPUProfile(shell=shell)
    # without the catalogue: to import it takes longer than all else that the extension needs
    GPUProfile.gpuprofile.__doc__ = _help("Settings: see %gpuprofile --help.")
    GPUProfile.gpulab.__doc__ = COMMANDS_HELP
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(complete)


def unregister(shell: Any) -> None:
    """Forget the magics, their defaults and their completion."""
    for kind, name in (("cell", "gpuprofile"), ("line", "gpuprofile"), ("line", "gpulab")):
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(GPUProfile.__name__, None)
    shell.configurables[:] = [c for c in shell.configurables if not isinstance(c, GPUProfile)]
    shell.Completer.custom_matchers[:] = [m for m in shell.Completer.custom_matchers if m is not complete]
