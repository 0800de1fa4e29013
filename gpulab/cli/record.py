"""`gpulab record`: a Python script or module, run in this process as `python` would run it, and profiled."""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import linecache
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpulab.api.job_report import job_report, keep_only, may_keep
from gpulab.api.profile import profile
from gpulab.capture.job import JOB, keep_few
from gpulab.cli import complain, show_recorded
from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.launch.launcher import end_with_launcher, followed_ranks, is_rank, record_words
from gpulab.options import check_only_ranks
from gpulab.run import Run
from gpulab.store.folders import Store, new_id
from gpulab.store.jobs import await_job
from gpulab.user_code import hide_gpulabs_frames, runs_users_code
from gpulab.views.report.ranks import RankedReport
from gpulab.views.report.report import Report
from gpulab.views.report.sections import has_no_step
from gpulab.views.view import Answer
from gpulab.views.waiting import FIRST_S, TerminalLine, waiting

if TYPE_CHECKING:
    from gpulab.tuning.code import TextCode
    from gpulab.tuning.execute import Execution

runs_users_code(__file__)

INTERRUPTED_STATUS = 130


def record(options: argparse.Namespace) -> Answer:
    """Do `gpulab record`; the exit status is the script's own."""
    return Answer(status=_recorded(options))


def _recorded(options: argparse.Namespace) -> int:
    _check_comparison(options)
    if not options.name and options.before is None:
        options.name = os.path.basename(options.script)
    if options.ranks is not None:
        check_only_ranks(options.only_ranks, options.ranks)
        if not options.module:
            _read(options.script)
        for path in filter(None, (options.html, options.json)):
            _require_folder(path)
        from gpulab.cli.ranks import launch

        return launch(options)
    if is_rank():
        keep_few()
    else:
        check_only_ranks(options.only_ranks, None)
    if options.before is not None or options.with_launcher:
        end_with_launcher()
    script = _Script(options.script, options.args, options.before, is_module=options.module)
    for path in (options.html, options.json):
        _require_folder(path)
    if options.plan is not None or options.ab:
        return _experiment(options, script)
    if options.set:
        try:
            script.prepare()
            script.change(options.set)
        except BaseException as e:
            if e is not script.raised:
                raise
            return script.status(e)
    terminal = sys.stderr  # the script may redirect it
    raised: BaseException | None = None
    shown: list[int] = []  # the status of the report: in the middle of the script where that is asked to end
    profiled = profile(
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
        source="script" if options.before is None else "cell",
        code=script.text,
        execution=script.execution,
        progress_of=os.path.basename(options.script),
        keeps_trace=lambda run: may_keep(options.only_ranks, run.job),
        terminated=lambda: shown.append(
            0 if options.silent or _is_other_rank(profiled.run) else show_recorded(profiled.report, options, terminal)
        ),
    )
    try:
        if not options.set:
            script.prepare()
    except BaseException as e:
        if e is not script.raised:
            raise
        return script.status(e)
    try:
        with followed_ranks(_of_each(options), {JOB: f"{platform.node()}-{new_id()}"}):
            with _starting(options):
                profiled.start()
            with profiled:
                script.run()
    except BaseException as e:
        if e is not script.raised:
            raise
        raised = e
    sys.stdout.flush()
    if options.only_ranks is not None and profiled.path is not None:
        Store().settle_trace(profiled.path)
    if options.silent:
        sys.stderr.write("".join(f"gpulab: {m.reason}.\n" for m in profiled.run.missing if m.key == "ranks"))
        return script.status(raised)
    if not shown:
        shown_report = _report_of(profiled)
        shown.append(show_recorded(shown_report, options, terminal) if shown_report is not None else 0)
        if options.only_ranks is not None and isinstance(shown_report, RankedReport):
            keep_only(options.only_ranks, shown_report, Store())
    return script.status(raised) or shown[0]


def _starting(options: argparse.Namespace) -> AbstractContextManager[object]:
    """PyTorch is imported inside, which may take long; of several ranks one says so."""
    if options.silent or options.no_live or os.environ.get("RANK", "0") != "0":
        return nullcontext()
    what = f"importing PyTorch, then running {os.path.basename(options.script)}"
    return waiting(what, first_s=0.0 if TerminalLine() else FIRST_S, log=True)


def _experiment(options: argparse.Namespace, script: _Script) -> int:
    from gpulab.api.ranked_experiment import run_experiment

    try:
        script.prepare()
    except BaseException as e:
        if e is not script.raised:
            raise
        return script.status(e)
    if options.plan is not None:
        return run_experiment(options, script.code())
    return _compare(options, script)


def _check_comparison(options: argparse.Namespace) -> None:
    """Raises UsageError for options that do not go together, with what does."""
    for name in ("pairs", "budget"):
        if getattr(options, name) is not None and not options.ab:
            raise UsageError(f"--{name} needs a comparison: add --ab NAME=VALUE.")
    for name in ("warmup", "trace_steps", "whole", "only_ranks"):
        if options.ab and getattr(options, name) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} and --ab cannot be combined: drop one.")
    if options.ab and (is_rank() or options.ranks is not None):
        setting = " ".join(f"--set {setting}" for setting in options.ab)
        raise UsageError(
            "--ab runs in a single process, not in several ranks: record both with --ranks N, the second with "
            f"{setting}, then gpulab compare -2 -1."
        )


def _compare(options: argparse.Namespace, script: _Script) -> int:
    """`--ab`: the baseline and changed, in turn in this process."""
    with _starting(options):
        from gpulab.api.experiment import conduct, experiments
        from gpulab.devices.machine import detect_device
        from gpulab.tuning.plan import Plan, arms_in
        from gpulab.views.progress import log_lines

        code = script.code()
        detect_device(options.device)
    plan = Plan(
        arms_in(code.variables, [*options.ab, *(options.set or ())]),
        block_steps=options.steps,
        pairs=options.pairs,
        budget_s=options.budget,
        name=options.name,
        device=options.device,
        trace=not options.no_trace,
        save=not options.no_save,
    )
    terminal, before = sys.stderr, len(experiments)
    try:
        conduct(code, plan, show=False, tell=log_lines(terminal))
    except GpulabError:
        raise
    except BaseException as e:
        hide_gpulabs_frames(e)
        script.raised = e
    sys.stdout.flush()
    shown = 0
    if len(experiments) > before and (script.raised is None or experiments[-1].comparisons):
        shown = show_recorded(experiments[-1], options, terminal)
    if isinstance(script.raised, KeyboardInterrupt):
        complain("interrupted; what was measured so far is above.")
        return INTERRUPTED_STATUS
    return script.status(script.raised) or shown


def _has_own_ranks(run: Run) -> bool:
    """Whether ranks were stored since the run began, which is not one of them."""
    try:
        entries = Store().list()
    except StoreError:
        return False
    return any(entry.job is not None and entry.created >= run.created for entry in entries)


def _is_other_rank(run: Run) -> bool:
    """Whether the first rank speaks for it."""
    return run.job is not None and (run.job.world_size or 1) > 1 and run.job.rank > 0


def _of_each(options: argparse.Namespace) -> Sequence[str]:
    """The options of a rank that the script starts itself; rank 0 speaks."""
    names = ("name", "steps", "warmup", "trace_steps", "device", "no_trace", "whole", "no_save")
    return [*record_words({**{name: getattr(options, name) for name in names}, "no_live": True}, [])[3:]]


def _report_of(profiled: profile) -> Report | RankedReport | None:
    """What is to be shown at the end: of a job's ranks the first one speaks, for all of them."""
    job = profiled.run.job
    if job is None and has_no_step(profiled.run) and _has_own_ranks(profiled.run):
        sys.stderr.write("gpulab: the ranks that the script started are recorded; see gpulab report latest\n")
        return None
    if job is None or job.world_size is None or job.world_size < 2 or not profiled.settings.save:
        return profiled.report
    if job.rank:
        return None
    store = Store()
    try:
        return job_report(await_job(store, job.id, job.world_size), store)
    except StoreError:
        return profiled.report


class _Script:
    """A Python file, run in this process as `python file` would run it, or a module, as `python -m module` would.

    Nothing is put back afterwards: the script's threads and exit handlers still need their `__main__`.
    """

    def __init__(self, path: str, args: Sequence[str], before: Path | None = None, *, is_module: bool = False) -> None:
        self._spec = _module_spec(path, args) if is_module else None
        self._path = path if self._spec is None else str(self._spec.origin)
        self._source = _read(self._path)
        self._before = before
        self._args = args
        self._main = ModuleType("__main__")
        self.execution: Execution | None = None  # with the settings that were asked for
        self.raised: BaseException | None = None

    def change(self, settings: Sequence[str]) -> None:
        """Let it, which is prepared, run with these settings. Raises UsageError for one that it cannot have."""
        from gpulab.tuning.execute import execution_with

        self.execution = execution_with(settings, self.code())

    def code(self) -> TextCode:
        """What can run again; it is prepared. Raises UsageError where it does not parse."""
        from gpulab.api.ranked_experiment import file_code

        cell = self._before is not None
        file = os.path.basename(self._path) if cell else os.path.abspath(self._path)
        try:
            return file_code(self.text, self.namespace, file, "cell" if cell else "script")
        except SyntaxError as e:
            raise UsageError(f"The script does not parse: {e}.") from None

    @property
    def text(self) -> str:
        """The script's text; empty where its encoding is wrong, which running it will say."""
        try:
            return importlib.util.decode_source(self._source)
        except (SyntaxError, UnicodeDecodeError):
            return ""

    @property
    def namespace(self) -> dict[str, Any]:
        """Its names."""
        return self._main.__dict__

    def prepare(self) -> None:
        """Become its process: what stands before it runs now. What that raises is kept in `raised` and raised on."""
        absolute = os.path.abspath(self._path)
        self._main.__file__ = absolute  # the spawned workers of a DataLoader find their __main__ by it
        self._main.__loader__ = importlib.machinery.SourceFileLoader("__main__", absolute)
        if self._spec is not None:
            self._main.__spec__, self._main.__package__ = self._spec, self._spec.parent
            self._main.__loader__, self._main.__dict__["__cached__"] = self._spec.loader, self._spec.cached
        self._main.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = self._main
        sys.argv = [self._path, *self._args]
        if self._before is not None:
            self._show_lines(self._source, os.path.basename(absolute))
            self._execute(_read(self._before), self._before.name)
        elif self._spec is None and not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(self._path))

    def run(self) -> None:
        """Run to its end, of which a clean `sys.exit` is one. What else it raises is kept in `raised` and raised on."""
        absolute = os.path.abspath(self._path)
        if self.execution is not None:
            with self.execution.applied() as code:
                try:
                    code.run()
                except BaseException as e:
                    self.raised = e
                    raise
        else:
            self._execute(self._source, absolute if self._before is None else os.path.basename(absolute))

    def _show_lines(self, source: bytes, file: str) -> None:
        """A cell's files lie in a folder that only gpulab knows: their lines are known by the bare names."""
        text = source.decode()
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)

    def _execute(self, source: bytes, file: str) -> None:
        if self._before is not None:
            self._show_lines(source, file)
        try:
            exec(compile(source, file, "exec", dont_inherit=True), self._main.__dict__)
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
            if raised.code is None:
                return 0
            if isinstance(raised.code, int):
                return raised.code
            print(raised.code, file=sys.stderr)
            return 1
        sys.excepthook(type(raised), raised, raised.__traceback__)
        return INTERRUPTED_STATUS if isinstance(raised, KeyboardInterrupt) else 1


def _module_spec(name: str, args: Sequence[str]) -> importlib.machinery.ModuleSpec:
    """Where a module's code is, of a package that of its `__main__`: the packages around it are imported, as by Python.

    Raises UsageError where there is none.
    """
    if name.endswith(".py"):
        raise UsageError(f"After -m stands the name of a module: leave out the .py of {name!r}, or the -m.")
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.argv = ["-m", *args]
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as e:
        raise UsageError(f"The module {name!r} cannot be found: {e}.") from e
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        raise UsageError(f"There is no module {name!r} that can be run.")
    return spec


def _read(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"The script {str(path)!r} cannot be opened: {e.strerror or e}.") from e


def _require_folder(path: Path | None) -> None:
    if path is not None and (not path.name or path.is_dir()):
        raise UsageError(f"{str(path)!r} is a folder: name a file in it.")
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{str(path)!r} cannot be written: there is no folder {str(path.parent)!r}.")
