"""`gpulab record`: runs a Python script or module as `python` would, and profiles it."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext

from gpulab.analysis.facts import has_no_step
from gpulab.api.job_report import job_report, keep_only, may_keep
from gpulab.api.profile import followed, profile
from gpulab.capture.job import keep_few
from gpulab.cli import complain, show_recorded
from gpulab.cli.script import INTERRUPTED_STATUS, Script, read
from gpulab.errors import GpulabError, StoreError, UsageError
from gpulab.launch.launcher import end_with_launcher
from gpulab.launch.own_ranks import is_rank
from gpulab.options import check_only_ranks, check_without
from gpulab.run import Run
from gpulab.store.files import check_target
from gpulab.store.folders import Store
from gpulab.store.jobs import await_job
from gpulab.user_code import hide_gpulabs_frames, runs_users_code
from gpulab.views.report.ranks import RankedReport
from gpulab.views.report.report import Report
from gpulab.views.view import Answer
from gpulab.views.waiting import FIRST_S, TerminalLine, waiting

runs_users_code(__file__)


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
            read(options.script)
        _check_targets(options)
        from gpulab.cli.ranks import launch

        return launch(options)
    if is_rank():
        keep_few()
    else:
        check_only_ranks(options.only_ranks, None)
    if options.before is not None or options.with_launcher:
        end_with_launcher()
    script = Script(options.script, options.args, options.before, is_module=options.module)
    _check_targets(options)
    is_experiment = options.plan is not None or options.ab
    if (is_experiment or options.set) and not script.prepared():
        return script.status()
    return _compare(options, script) if is_experiment else _profile(options, script)


def _profile(options: argparse.Namespace, script: Script) -> int:
    """Run once with the settings of `--set` and show the report. Returns the script's exit status."""
    execution = None
    if options.set:
        from gpulab.tuning.execute import execution_with

        execution = execution_with(options.set, script.code())
    terminal = sys.stderr  # the script may redirect it
    statuses: list[int] = []  # of the report; set early if the script is terminated
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
        execution=execution,
        progress_of=os.path.basename(options.script),
        keeps_trace=lambda run: may_keep(options.only_ranks, run.job),
        terminated=lambda: statuses.append(
            0 if options.silent or _is_other_rank(profiled.run) else show_recorded(profiled.report, options, terminal)
        ),
    )
    if not script.prepared():
        return script.status()
    try:
        with followed(profiled.settings, silent=False):  # rank 0 shows the report
            with _starting(options):
                profiled.start()
            with profiled:
                script.run(execution)
    except BaseException as e:
        if e is not script.raised:
            raise
    else:
        script.raised = None  # at most the requested stop
    sys.stdout.flush()
    if options.only_ranks is not None and profiled.path is not None:
        Store().settle_trace(profiled.path)
    if options.silent:
        sys.stderr.write("".join(f"gpulab: {m.reason}.\n" for m in profiled.run.missing if m.key == "ranks"))
        return script.status()
    if not statuses:
        result = _report_of(profiled)
        statuses.append(show_recorded(result, options, terminal) if result is not None else 0)
        if options.only_ranks is not None and isinstance(result, RankedReport):
            keep_only(options.only_ranks, result, Store())
    return script.status() or statuses[0]


def _starting(options: argparse.Namespace) -> AbstractContextManager[object]:
    """A progress line while PyTorch is imported; with several ranks only the first shows it."""
    if options.silent or options.no_live or os.environ.get("RANK", "0") != "0":
        return nullcontext()
    what = f"importing PyTorch, then running {os.path.basename(options.script)}"
    return waiting(what, first_s=0.0 if TerminalLine() else FIRST_S, log=True)


def _check_comparison(options: argparse.Namespace) -> None:
    """Raises UsageError for options that cannot be combined."""
    for name in ("pairs", "budget"):
        if getattr(options, name) is not None and not options.ab:
            raise UsageError(f"--{name} needs a comparison: add --ab NAME=VALUE.")
    if options.ab:
        check_without(options, ("warmup", "trace_steps", "whole", "only_ranks"), "ab")
    if options.ab and (is_rank() or options.ranks is not None):
        setting = " ".join(f"--set {setting}" for setting in options.ab)
        raise UsageError(
            "--ab runs in a single process, not in several ranks: record both with --ranks N, the second with "
            f"{setting}, then gpulab compare -2 -1."
        )


def _compare(options: argparse.Namespace, script: Script) -> int:
    """Do `--ab`: run the baseline and the changed script interleaved in this process, or this rank's part of that."""
    if options.plan is not None:
        from gpulab.api.ranked_experiment import run_experiment

        return run_experiment(options, script.code())
    with _starting(options):
        from gpulab.api.experiment import conduct, experiments
        from gpulab.devices.machine import detect_device
        from gpulab.tuning.schedule import Plan, arms_in
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
    status = 0
    if len(experiments) > before and (script.raised is None or experiments[-1].comparisons):
        status = show_recorded(experiments[-1], options, terminal)
    if isinstance(script.raised, KeyboardInterrupt):
        complain("interrupted; what was measured so far is above.")
        return INTERRUPTED_STATUS
    return script.status() or status


def _has_own_ranks(run: Run) -> bool:
    """Whether this run is no rank, but ranks were stored since it began."""
    try:
        entries = Store().list()
    except StoreError:
        return False
    return any(entry.job is not None and entry.created >= run.created for entry in entries)


def _is_other_rank(run: Run) -> bool:
    """Whether this is a rank other than the first, which reports for all."""
    return run.job is not None and (run.job.world_size or 1) > 1 and run.job.rank > 0


def _report_of(profiled: profile) -> Report | RankedReport | None:
    """The report to show at the end: the first rank shows the report of the whole job, other ranks show none."""
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


def _check_targets(options: argparse.Namespace) -> None:
    """Raises StoreError if a file of the report cannot be written."""
    for path in filter(None, (options.html, options.json)):
        check_target(path)
