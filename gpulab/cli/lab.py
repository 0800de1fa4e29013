"""`gpulab lab`: the learner's own copies of the lessons, open in JupyterLab."""

from __future__ import annotations

import argparse
import subprocess

from gpulab.cli.output import write
from gpulab.formatting import plural
from gpulab.lessons.catalogue import lesson_named
from gpulab.lessons.editions import copy_lessons, jupyterlab_command
from gpulab.views.wording import plain


def open_lessons(options: argparse.Namespace) -> int:
    """Do `gpulab lab`."""
    entry = lesson_named(options.lesson)
    copied = copy_lessons(options.folder.absolute(), options.edition)
    folder = plain(str(copied.folder))
    if copied.new:
        write(f"{plural(len(copied.new), 'lesson')} copied to {folder}\n")
    if copied.kept:
        write(f"{plural(len(copied.kept), 'lesson')} in {folder} kept: your copies are never overwritten\n")
    if options.no_open:
        return 0
    command = jupyterlab_command(copied.folder, entry.name, options.args)
    write(f"Opening JupyterLab on lesson {entry.number}. Press Ctrl+C twice to quit.\n")
    try:
        return subprocess.call(command, cwd=copied.folder)
    except KeyboardInterrupt:
        return 0
