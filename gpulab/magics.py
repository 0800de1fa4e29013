"""The magics `%%gpuprofile` and `%gpulab`: they parse the line, run the cell or the command, and show the result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

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
from traitlets import Bool, Int, Unicode

from gpulab.arguments import WORD, HelpRequest, Parser, overview, perform, split, text_of
from gpulab.capture import threads
from gpulab.commands import PROFILE
from gpulab.errors import GpulabError, RankError, UsageError
from gpulab.options import check_only_ranks, check_without, without_comment
from gpulab.tuning import cell_code
from gpulab.tuning.cell_code import Interrupted
from gpulab.user_code import hide_gpulabs_frames, runs_users_code

if TYPE_CHECKING:
    from gpulab.api.cell_ranks import RankedCell
    from gpulab.api.profile import profile
    from gpulab.api.ranked_experiment import RankedExperiment, RanksSweep
    from gpulab.tuning.code import Code
    from gpulab.tuning.execute import Execution
    from gpulab.tuning.schedule import Plan
    from gpulab.views.comparison import Compared
    from gpulab.views.view import Answer

runs_users_code(__file__)

_PROFILE = Parser(PROFILE, PROFILE.name)
_OPTIONS = _PROFILE._option_string_actions
MODULE_CALLS = 5  # samples: at the beginning, loader, first update, two backward passes; none in later epochs
_COMPARING = ("ab", "sweep")
_OF_COMPARISONS = ("pairs", "budget", "seeds")
_OF_CLUSTERS = ("nodes", "time", "sbatch")
_OF_EACH_RANK = (
    "only_ranks",
    "name",
    "steps",
    "warmup",
    "trace_steps",
    "device",
    "no_trace",
    "no_live",
    "whole",
    "set",
)
_INNER = "%%gpuprofile inside a measured cell"


def _check_combination(options: argparse.Namespace) -> None:
    """Raises UsageError for options that contradict each other."""
    comparing = [name for name in _COMPARING if getattr(options, name)]
    for name in _OF_COMPARISONS:
        if getattr(options, name) is not None and not comparing:
            raise UsageError(f"--{name} needs a comparison: add --ab NAME=VALUE or --sweep NAME=A,B,C.")
    if options.ranks is not None or options.on is not None:
        check_without(options, ("no_save",), "ranks" if options.ranks is not None else "on")
    check_only_ranks(options.only_ranks, (options.ranks or 1) if options.ranks is not None or options.on else None)
    for name in _OF_CLUSTERS:
        if options.on is None and getattr(options, name) is not None:
            raise UsageError(f"--{name} needs a cluster: add --on slurm.")
    if comparing:
        check_without(options, ("only_ranks", "warmup", "trace_steps", "whole"), comparing[0])


def _check_inner(options: argparse.Namespace) -> None:
    """Raises UsageError if a magic inside a measured cell requests more than a measurement."""
    more = next((name for name in (*_COMPARING, "set", "ranks", "on") if getattr(options, name)), None)
    if more is not None:
        raise UsageError(f"{_INNER} cannot take --{more}: put one %%gpuprofile --{more} on the cell's first line.")


def _run_inner(code: Code) -> object:
    """Run the code without measuring: nested measurements would distort each other."""
    sys.stderr.write(f"gpulab: {_INNER} is ignored: the outer one already measures this code.\n")
    return code.run()


def _run_comparison(code: Code, plan: Plan, *, full: bool, give: bool) -> Compared | None:
    from gpulab.api.experiment import conduct

    compared = conduct(code, plan, full=full)
    return compared if give else None


def _run_ranks(cell: RankedCell | RankedExperiment | RanksSweep, *, give: bool) -> object:
    try:
        result = cell.run()
    except RankError:
        raise
    except GpulabError as e:
        raise LineError(str(e)) from None
    return result if give else None


def _run_profiled(execution: Execution, profiler: profile, *, give: bool) -> object:
    value = None
    applied = execution.applied() if execution.arm.settings else execution.applied(module_calls=MODULE_CALLS)
    try:
        with profiler, applied as code:
            value = code.run()
    finally:
        _offer_bench(profiler)
    with suppress(Exception):  # a fault of gpulab costs only the bench's values
        if len(profiler.run.steps):
            execution.remember(profiler.run)
    return profiler.run if give else value


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
        try:
            if cell is None and not line.strip():
                raise HelpRequest
            return self._prepared(line, cell, local_ns)()
        except HelpRequest:
            print(help_text())
            return None
        except (LineError, Interrupted):
            raise
        except BaseException as error:
            hide_gpulabs_frames(error)
            if not threads.measures_here():
                cell_code.show_as_bare(self.shell, error)
            raise

    def _prepared(self, line: str, cell: str | None, local_ns: dict[str, Any] | None) -> Callable[[], object]:
        """A function that runs the code and returns the value of the magic; its profile has already started.

        Raises IPython's UsageError in one line, HelpRequest, and SyntaxError as the cell alone would.
        """
        try:
            if cell is None:
                options, text = split_statement(line)
            else:
                options, text = parse(split(without_comment(line), PROFILE.name)), cell
            if not text.strip():
                raise UsageError("No code to profile: put it below %%gpuprofile, or after %gpuprofile.")
            from gpulab.tuning.code import Code

            parsed = cell_code.parsed(self.shell, text)
            give = options.give and not (parsed.silent and cell is not None)
            _check_combination(options)
            source: Literal["cell", "statement"] = "cell" if cell is not None else "statement"
            code = Code.of_cell(self.shell, text, parsed, source, local_ns)
            if threads.measures_here():
                _check_inner(options)
                return partial(_run_inner, code)
            words = [word.partition("=")[0].strip() for word in options.sweep or ()]
            sweeps_ranks = "ranks" in words and not code.variables.has("ranks")
            if options.ranks is not None or options.on is not None or sweeps_ranks:
                return partial(_run_ranks, self._ranked(options, code, parsed, local_ns, sweeps_ranks), give=give)
            if any(getattr(options, name) for name in _COMPARING):
                from gpulab.tuning.resolve import check

                plan = self._plan(options, code)
                check(code, plan)
                return partial(_run_comparison, code, plan, full=options.all, give=give)
            from gpulab.tuning.execute import execution_with

            execution = execution_with(options.set, code)
            profiler = self._profiler(options, execution)
            profiler.start()
            return partial(_run_profiled, execution, profiler, give=give)
        except GpulabError as e:
            raise LineError(f"{_ended(str(e))}The {'statement' if cell is None else 'cell'} did not run.") from None

    def _fill_in(self, options: argparse.Namespace) -> None:
        """Set options missing from the line to the defaults of `%config GPUProfile`."""
        options.no_trace |= not (self.trace or options.trace_steps is not None or options.whole)
        options.no_live |= not self.live
        options.no_save |= not self.save
        options.device = options.device or self.device
        for name in ("steps", "warmup", *(() if options.no_trace else ("trace_steps",))):
            if getattr(options, name) is None:
                setattr(options, name, getattr(self, name))

    def _plan(self, options: argparse.Namespace, code: Code) -> Plan:
        from gpulab.tuning.schedule import Plan, arms_in

        settings = [*(options.ab or ()), *(options.set or ())]
        return Plan(
            arms_in(code.variables, settings, options.sweep or ()),
            block_steps=options.steps,
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
        code: Code,
        parsed: cell_code.Cell,
        local_ns: dict[str, Any] | None,
        sweeps_ranks: bool,
    ) -> RankedCell | RankedExperiment | RanksSweep:
        from gpulab.api.cell_ranks import RankedCell
        from gpulab.api.ranked_experiment import RankedExperiment, RanksSweep, counts_of
        from gpulab.launch.slurm import Allocation
        from gpulab.tuning.schedule import check_plan

        counts = counts_of(options.sweep) if sweeps_ranks else None
        if counts is not None and (options.ab or options.seeds or options.no_save):
            raise UsageError("--sweep ranks=… only compares numbers of ranks: drop --ab, --seeds and --no-save.")
        if counts is not None and (options.ranks is not None or options.on is not None):
            raise UsageError("--sweep ranks=… sets the number of ranks on this machine: drop --ranks and --on.")
        plan = self._plan(options, code) if counts is None else None
        self._fill_in(options)
        of_each = {name: getattr(options, name) for name in _OF_EACH_RANK}
        of_each["no_trace"] |= counts is not None
        shell: Any = self.shell
        namespace = {**shell.user_ns, **(local_ns or {})}
        cells = [cell for cell in shell.user_ns.get("In", []) if isinstance(cell, str)]
        source = shell.transform_cell(code.text)
        ranks, allocation = options.ranks or 1, None
        if options.on is not None:
            minutes = options.time or Allocation(1).minutes
            allocation = Allocation(ranks, options.nodes or 1, minutes, options.sbatch or "")
        cell = RankedCell.of(
            source, parsed.tree, namespace, cells, ranks, of_each, full=options.all, allocation=allocation
        )
        if counts is not None:
            return RanksSweep(cell, counts, options.pairs, options.budget, options.all)
        if plan is None or not any(getattr(options, name) for name in _COMPARING):
            return cell
        check_plan(plan)
        return RankedExperiment(cell, plan, options.all)

    def _profiler(self, options: argparse.Namespace, execution: Execution) -> profile:
        from gpulab.api.profile import profile

        self._fill_in(options)
        return profile(
            options.name,
            steps=options.steps,
            warmup=options.warmup,
            trace_steps=options.trace_steps,
            trace=not options.no_trace,
            live=not options.no_live,
            save=not options.no_save,
            device=options.device,
            whole=options.whole,
            full=options.all,
            source=execution.code.source,
            code=execution.code.text,
            execution=execution,
        )

    @no_var_expand
    @line_magic
    def gpulab(self, line: str) -> None:
        """Commands on the profiled runs; %gpulab --help lists them."""
        words: list[str] = []
        try:
            words = split(without_comment(line), "%gpulab")
            _show(*perform(words, "notebook"))
        except HelpRequest as e:
            print(e)
        except GpulabError as e:
            raise LineError(str(e)) from None
        except Interrupted:
            raise
        except BaseException as error:
            if words[:1] in (["climb"], ["headspace"]):  # for errors of the user's cell
                hide_gpulabs_frames(error)
                cell_code.show_as_bare(self.shell, error)
            raise


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options of `%%gpuprofile`. Raises HelpRequest, and UsageError in one line with the nearest valid word."""
    options = _PROFILE.read(words)
    if len(options.name) > 1:
        first, second, *_ = options.name
        raise UsageError(f"A run has one name, got {first!r} and {second!r}. Quote a name with spaces.")
    options.name = "".join(options.name)
    return options


def split_statement(line: str) -> tuple[argparse.Namespace, str]:
    """The options at the beginning of a line, and the statement after them, unchanged."""
    words: list[str] = []
    rest = line.lstrip()
    while rest.startswith("-") and not rest.startswith("- "):
        word, rest = _first_word(rest)
        words.append(word)
        action = _OPTIONS.get(word)
        if action is not None and action.nargs is None and action.metavar:
            value, rest = _first_word(rest)
            words.append(value)
    return parse(words), rest


def _first_word(line: str) -> tuple[str, str]:
    """The first word, without its quotes as in a shell, and the rest. Raises UsageError for an open quote."""
    match = WORD.match(line)
    end = match.end() if match is not None else 0
    return "".join(split(line[:end], PROFILE.name)), line[end:].lstrip()


def _ended(sentence: str) -> str:
    """The text ended so that another sentence can follow; after a line of code, with a line break."""
    if "\n    " in sentence and sentence.splitlines()[-1].startswith("    "):
        return f"{sentence}\n"
    return f"{sentence} " if sentence.endswith((".", "!", "?")) else f"{sentence}. "


def _offer_bench(profiler: profile) -> None:
    """Buttons under the report that open the bench and try the first fix; `%gpulab panel` works without them."""
    from gpulab.views.widgets import in_notebook

    if in_notebook():
        with suppress(Exception):
            from gpulab.api.memory import failure_of
            from gpulab.bench.cures import offer_cures
            from gpulab.bench.opening import offer_bench

            if failure_of(profiler.run) is not None:
                offer_cures()
            else:
                offer_bench(dict(profiler.report.diagnosis.first.settings))


def _show(answer: Answer, options: argparse.Namespace) -> None:
    """Display the result of a command; in a terminal, print it."""
    from gpulab.views.view import View
    from gpulab.views.widgets import in_notebook

    asks_for_text = getattr(options, "json", False) or getattr(options, "html", None) is not None or answer.notes
    if not in_notebook() or isinstance(answer.content, str) or asks_for_text:
        print(text_of(answer, options), end="")
        return
    from IPython.display import display

    if isinstance(answer.content, View):
        display(answer.content.bundle(full=getattr(options, "all", False)), raw=True)  # type: ignore[no-untyped-call]
    else:
        display(answer.content)  # type: ignore[no-untyped-call]


@context_matcher()  # type: ignore[untyped-decorator]
def complete(context: CompletionContext) -> SimpleMatcherResult:
    """Tab completion in a magic's line: options, commands, knobs and runs."""
    from gpulab.completion import completions

    return completions(context)


def help_text() -> str:
    """The text of `%gpuprofile --help`: the options, examples, and every setting of the catalogue."""
    from gpulab.knobs.catalogue import KNOBS

    return _help(
        f"Settings: {', '.join(KNOBS)}, or any variable that the cell reads, or assigns a literal at its top level."
    )


def _help(settings: str) -> str:
    defaults = "%config GPUProfile lists the defaults; %config GPUProfile.steps = 50 sets one."
    return f"{_PROFILE.format_help()}{fill(settings, 116)}\n{defaults}\n"


def register(shell: Any) -> None:
    """Register the magics and their completion."""
    magics = GPUProfile(shell=shell)
    # without the catalogue: its import takes longer than everything else in the extension
    GPUProfile.gpuprofile.__doc__ = _help("Settings: see %gpuprofile --help.")
    GPUProfile.gpulab.__doc__ = overview("notebook")
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(complete)


def unregister(shell: Any) -> None:
    """Unregister the magics, their defaults and their completion."""
    for kind, name in (("cell", "gpuprofile"), ("line", "gpuprofile"), ("line", "gpulab")):
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(GPUProfile.__name__, None)
    shell.configurables[:] = [c for c in shell.configurables if not isinstance(c, GPUProfile)]
    shell.Completer.custom_matchers[:] = [m for m in shell.Completer.custom_matchers if m is not complete]
