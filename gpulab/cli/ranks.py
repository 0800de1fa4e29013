"""`gpulab record --ranks N`: runs a script as N ranks under PyTorch's launcher and records each."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from gpulab.api.cell_ranks import STORED_S, failure_words
from gpulab.api.job_report import job_report, keep_only
from gpulab.capture.job import torchrun_job_id
from gpulab.cli import complain, show_recorded
from gpulab.errors import StoreError
from gpulab.formatting import plural
from gpulab.launch.launcher import (
    RECORD,
    ended_with_this_process,
    launcher_words,
    option_words,
    shortage,
    threads_of_each,
)
from gpulab.launch.own_ranks import own_ranks
from gpulab.store.folders import Store, default_root, new_id
from gpulab.store.jobs import await_job

_OPTIONS = ("set", "only_ranks", "name", "steps", "warmup", "trace_steps", "device")
_SWITCHES = ("no_trace", "whole", "no_live", "no_save")
_OF_A_REPORT = ("html", "json", "all")


def launch(options: argparse.Namespace) -> int:
    """Do `gpulab record --ranks N`, and show one report of the stored ranks, however they ended.

    Returns the exit status of the launcher: 0 if every rank ended with 0; after a signal, the status for that signal.
    """
    if short := shortage(options.ranks):
        sys.stderr.write(f"gpulab: {short}\n")
    if (own := own_ranks(_text(options.script), sure=True)) is not None:
        sys.stderr.write(
            f"gpulab: {own.starter} on line {own.line} would start its own ranks inside each of these "
            f"{options.ranks} ranks: use {own.instead} instead.\n"
        )
    sys.stderr.write(f"gpulab: starting {plural(options.ranks, 'rank')} of {os.path.basename(options.script)} …\n")
    run_id = f"job-{new_id()}"
    words = ended_with_this_process([*launcher_words(options.ranks, run_id), *_of_each(options)])
    place = str(default_root().parent)  # absolute, because the script may change the current folder
    environment = {**os.environ, **threads_of_each(options.ranks), "GPULAB_DIR": place}
    with subprocess.Popen(words, env=environment) as process:
        status = _ended(process)
    view = 0 if options.no_save else _show_job(options, torchrun_job_id(run_id), status)
    return status or view


def _of_each(options: argparse.Namespace) -> Sequence[str]:
    """The command of each rank: the same options without the number of ranks; reports only if nothing is saved."""
    names = (*_OPTIONS, *_SWITCHES, *(_OF_A_REPORT if options.no_save else ()))
    values = {name: getattr(options, name) for name in names}
    own = {"with_launcher": True, "silent": not options.no_save}
    target = ["-m", options.script] if options.module else [options.script]
    return [*RECORD, *option_words({**values, **own}), *target, *options.args]


def _show_job(options: argparse.Namespace, job_id: str, ended: int) -> int:
    """Show the report of all ranks and which of them failed. Returns 0, or the status of a file not written."""
    store = Store()
    try:
        ranks = await_job(store, job_id, options.ranks, STORED_S)
    except StoreError:  # the ranks have printed why
        complain("no rank recorded a run.")
        return 0
    view = job_report(ranks, store)
    status = show_recorded(view, options, sys.stderr)
    if failure := failure_words(ranks, "script", ended if ended < 128 else 0):  # not if a signal ended it
        complain(failure)
    if options.only_ranks is not None:
        keep_only(options.only_ranks, view, store)
    return status


def _text(script: str) -> str:
    """The text of the script; empty if it cannot be read, which each rank reports."""
    try:
        return importlib.util.decode_source(Path(script).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for the launcher and forward SIGTERM; Ctrl-C reaches it from the terminal. Returns a status."""
    signals: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, tell)
    try:
        while True:
            try:
                code = process.wait()
                return _status(-signals[0] if signals and code else code)
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def _status(code: int) -> int:
    """The exit status as in a shell: for a signal, 128 plus its number."""
    return code if code >= 0 else 128 - code
