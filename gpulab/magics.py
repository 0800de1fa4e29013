"""The magics: parse the line, profile the cell, show what came out."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError as LineError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from traitlets import Bool, Int, Unicode

from gpulab import cells
from gpulab.errors import GpulabError, UsageError

if TYPE_CHECKING:
    from gpulab.doors import profile

_EPILOG = """\
examples:
  %%gpuprofile                       above a training cell: profile it
  %%gpuprofile baseline --steps 50   name the run, end the cell cleanly after 50 steps
  %gpuprofile trainer.train()        one line of code
  run = %gpuprofile -r train()       and keep the record

The cell runs as without the magic. The run is kept in .gpulab/runs and is also gpulab.runs[-1].
Defaults: %config GPUProfile lists them, %config GPUProfile.steps = 50 sets one."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of leaving Python, and names the nearest valid option."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%gpuprofile: {message}.")


def _parser() -> _Parser:
    parser = _Parser(
        prog="%%gpuprofile",
        description="Profile a training cell: watch the device while it runs, read where each step's time went.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("name", nargs="?", default="", metavar="NAME", help="a name for the run")
    add("--steps", metavar="N", help="end the cell cleanly after N steps")
    add("--warmup", metavar="N", help="drop the first N steps from the figures (default: 1 to 3, by length)")
    add("--trace-steps", metavar="N", help="profile N steps in detail (default: up to 5)")
    add("--no-trace", action="store_true", help="measure only: no profiled window, no step breakdown")
    add("--whole", action="store_true", help="profile from the first line, for code without training steps")
    add("--no-live", action="store_true", help="no live plot while the cell runs")
    add("--no-save", action="store_true", help="do not keep the run on disk")
    add("--device", metavar="DEV", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("-r", "--return", dest="give", action="store_true", help="return the run instead of the cell's value")
    add("-h", "--help", action="store_true", help="show this text")
    return parser


PARSER = _parser()
OPTIONS = sorted(PARSER._option_string_actions)
HELP = PARSER.format_help()
_MAGIC_LINE = re.compile(r"\s*(?:(?P<cell>%%)|(?:.*=\s*)?%)gpuprofile\s")


@magics_class
class GPUProfile(Magics):
    """Defaults of %%gpuprofile."""

    steps = Int(None, allow_none=True, help="End every profiled cell after this many steps.").tag(config=True)
    warmup = Int(None, allow_none=True, help="Steps dropped from the figures.").tag(config=True)
    trace_steps = Int(None, allow_none=True, help="Steps profiled in detail.").tag(config=True)
    trace = Bool(True, help="Whether to profile a window of steps in detail.").tag(config=True)
    live = Bool(True, help="Whether to show the live plot.").tag(config=True)
    save = Bool(True, help="Whether to keep runs on disk.").tag(config=True)
    device = Unicode("auto", help="The device to account: auto, cpu, cuda, cuda:N.").tag(config=True)

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    def gpuprofile(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        value = None
        try:
            prepared = self._prepared(line, cell)
            if prepared is None:
                print(HELP)
                return None
            code, profiler, give = prepared
            with profiler:
                value = code.run(self.shell, local_ns)
        except LineError:
            raise
        except BaseException as error:
            from gpulab.doors import hide_our_frames

            hide_our_frames(error)
            cells.show_as_bare(self.shell, error)
            raise
        return profiler.run if give else value

    def _prepared(self, line: str, cell: str | None) -> tuple[cells.Cell, profile, bool] | None:
        """The code, its profile, already started, and whether to return the run; None where help is asked for.

        Raises IPython's UsageError in one line, and SyntaxError as the cell alone would.
        """
        try:
            options, statement = self._read(line, cell)
            if statement is None:
                return None
            code = cells.parsed(self.shell, statement)
            profiler = self._profiler(options, statement, "cell" if cell is not None else "statement")
            profiler.start()
        except GpulabError as e:
            raise LineError(f"{e} The {'statement' if cell is None else 'cell'} did not run.") from None
        return code, profiler, options.give and not (code.silent and cell is not None)

    def _read(self, line: str, cell: str | None) -> tuple[argparse.Namespace, str | None]:
        """The options and the code; None where a bare `%gpuprofile` asks for help. Raises UsageError."""
        if cell is not None:
            options, code = parse(_words(line)), cell
        else:
            options, code = split_statement(line)
        if options.help or (cell is None and not line.strip()):
            return options, None
        if not code.strip():
            raise UsageError("There is no code to profile: write it below %%gpuprofile, or after %gpuprofile.")
        return options, code

    def _profiler(self, options: argparse.Namespace, code: str, source: Literal["cell", "statement"]) -> profile:
        from gpulab.doors import profile

        asks_for_trace = options.trace_steps is not None or options.whole
        trace = not options.no_trace and (self.trace or asks_for_trace)
        return profile(
            options.name,
            steps=number("--steps", options.steps, self.steps),
            warmup=number("--warmup", options.warmup, self.warmup),
            trace_steps=number("--trace-steps", options.trace_steps, self.trace_steps if trace else None),
            trace=trace,
            live=self.live and not options.no_live,
            save=self.save and not options.no_save,
            device=options.device or self.device,
            whole=options.whole,
            source=source,
            code=code,
        )

    @no_var_expand
    @line_magic
    def gpulab(self, line: str) -> None:
        """%gpulab runs: the runs kept here. %gpulab doctor: what this machine can measure. %gpulab report [RUN]."""
        command, _, rest = line.strip().partition(" ")
        try:
            command_named(command)(rest.strip())
        except GpulabError as e:
            raise LineError(str(e)) from None


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read options. Raises UsageError in one line that names the word and the nearest valid one."""
    options, unknown = PARSER.parse_known_args(list(words))
    if unknown:
        word = unknown[0]
        if not word.startswith("-"):
            raise UsageError(f"One name is enough: {options.name!r} or {word!r}? Quote a name that has spaces.")
        near = nearest_option(word.split("=")[0])
        hint = f"did you mean {near}?" if near else "see %gpuprofile --help."
        raise UsageError(f"%%gpuprofile has no option {word}: {hint}")
    return options


def nearest_option(word: str) -> str | None:
    """The option most like a word that is none; of a single letter, the first option that begins with it."""
    if len(word) == 2:
        return next((o for o in OPTIONS if o.startswith(f"--{word[1]}")), None)
    return next(iter(difflib.get_close_matches(word, OPTIONS, n=1, cutoff=0.4)), None)


def split_statement(line: str) -> tuple[argparse.Namespace, str]:
    """Options up to the first word that is none, and the rest of the line untouched: a statement."""
    words: list[str] = []
    rest = line.lstrip()
    while rest.startswith("-") and not rest.startswith("- "):
        word, _, rest = rest.partition(" ")
        words.append(word)
        rest = rest.lstrip()
        action = PARSER._option_string_actions.get(word)
        if action is not None and action.nargs is None and action.metavar:
            value, _, rest = rest.partition(" ")
            words.append(value)
            rest = rest.lstrip()
    return parse(words), rest


def number(option: str, given: str | None, default: int | None) -> int | None:
    """A whole number from the line, else the configured default. Raises UsageError."""
    if given is None:
        return default
    try:
        return int(given)
    except ValueError:
        raise UsageError(f"{option} takes a whole number, not {given!r}.") from None


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as e:
        raise UsageError(f"%%gpuprofile {line}: {str(e).lower()}.") from None


def _nothing_more(command: str, rest: str) -> None:
    if rest:
        raise UsageError(f"%gpulab {command} takes nothing more, not {rest!r}.")


def _show_runs(rest: str) -> None:
    _nothing_more("runs", rest)
    from IPython.display import display

    from gpulab.doors import runs

    display(runs)  # type: ignore[no-untyped-call]


def _show_doctor(rest: str) -> None:
    _nothing_more("doctor", rest)
    from gpulab.sources.checkup import examine
    from gpulab.views import doctor

    print(doctor.render(examine()))


def _show_report(rest: str) -> None:
    from gpulab.doors import report, runs
    from gpulab.views.stage import Stage

    if not len(runs):
        raise UsageError("There is no run yet: put %%gpuprofile above a training cell first.")
    Stage.open(live=False).show(report(runs[rest] if rest else runs[-1]))


_COMMANDS: dict[str, Callable[[str], None]] = {"runs": _show_runs, "doctor": _show_doctor, "report": _show_report}


def command_named(name: str) -> Callable[[str], None]:
    """A `%gpulab` command. Raises UsageError naming the nearest."""
    if name in _COMMANDS:
        return _COMMANDS[name]
    near = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.0)
    asked = f"%gpulab has no command {name!r}" if name else "%gpulab takes a command"
    raise UsageError(f"{asked}: {', '.join(_COMMANDS)}." + (f" Did you mean {near[0]}?" if name and near else ""))


@context_matcher()  # type: ignore[untyped-decorator]
def complete(context: CompletionContext) -> SimpleMatcherResult:
    """Options for Tab after `%%gpuprofile` and `%gpuprofile`, without the Python names that would fit as well."""
    before = context.line_with_cursor[: context.cursor_position]
    magic = _MAGIC_LINE.match(before)
    wanted = magic is not None and (context.token.startswith("-") or (magic["cell"] and context.cursor_line == 0))
    used = before.removesuffix(context.token).split()
    fitting = [o for o in OPTIONS if wanted and o.startswith(context.token) and o not in used]
    return {"completions": [SimpleCompletion(o, type="option") for o in fitting], "suppress": bool(fitting)}


def register(shell: Any) -> None:
    """Make the magics known, their options completable."""
    magics = GPUProfile(shell=shell)
    GPUProfile.gpuprofile.__doc__ = HELP
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(complete)


def unregister(shell: Any) -> None:
    """Forget the magics, their defaults and their completion."""
    for kind, name in (("cell", "gpuprofile"), ("line", "gpuprofile"), ("line", "gpulab")):
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(GPUProfile.__name__, None)
    shell.configurables[:] = [c for c in shell.configurables if not isinstance(c, GPUProfile)]
    shell.Completer.custom_matchers[:] = [m for m in shell.Completer.custom_matchers if m is not complete]
