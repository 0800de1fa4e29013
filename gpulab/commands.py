"""The commands of gpulab: `%gpulab NAME` in a notebook, `gpulab NAME` at a terminal, and `%%gpuprofile`.

Each command is declared once, in a literal list: name, summary, options and function. Parsing, help, completion and
error messages derive from the list. A function is imported only when its command runs, so that help and errors are
instant.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpulab.options import (
    CLIMB_BUDGET_S,
    CLIMB_SEEDS,
    DEFAULT_BUDGET_S,
    FURTHER_BUDGET_S,
    LEAST_FREE,
    STOPPED_BY,
    only_ranks_type,
    port_type,
    price_type,
    seconds_type,
    share_type,
    whole_number_type,
)

Door = Literal["both", "notebook", "terminal"]


class Option(NamedTuple):
    """An option or a word of a command, as for argparse. `values`: completions, as words or as the name of a kind."""

    names: tuple[str, ...]
    argparse: dict[str, Any]
    values: tuple[str, ...] | Literal["settings", "sweep", "knobs", "runs", ""] = ""


class Command(NamedTuple):
    """A command. `run` is "module:function"; the function gets the options, if any, and may return an `Answer`.

    `more`: text below the options in the help. `verbs`: subcommands, as in `runs delete`.
    """

    name: str
    summary: str
    run: str
    options: tuple[Option, ...] = ()
    door: Door = "both"
    usage: str = "[options]"
    more: str = ""
    verbs: tuple[Command, ...] = ()


def _option(*names: str, values: Any = "", **settings: Any) -> Option:
    return Option(names, settings, values)


def _switch(name: str, explanation: str) -> Option:
    return _option(name, action="store_true", help=explanation)


def _text(name: str, metavar: str, explanation: str, values: Any = "") -> Option:
    return _option(name, metavar=metavar, help=explanation, values=values, default="")


def _path(name: str, metavar: str, explanation: str, **settings: Any) -> Option:
    return _option(name, type=Path, metavar=metavar, help=explanation, **settings)


def _words(name: str, metavar: str, explanation: str, values: Any = "") -> Option:
    return _option(name, nargs="*", metavar=metavar, help=explanation, values=values)


def _whole_number(name: str, least: int, explanation: str, default: int | None = None) -> Option:
    return _option(name, type=whole_number_type(name, least), metavar="N", help=explanation, default=default)


def _settings(name: str, explanation: str) -> Option:
    return _option(name, action="append", metavar="NAME=VALUE", help=explanation, values="settings")


def _seconds(explanation: str, default: float | None = None) -> Option:
    return _option("--budget", type=seconds_type("--budget"), metavar="SECONDS", help=explanation, default=default)


def _run_options(code: str, device: str | None = None) -> tuple[Option, ...]:
    """The options of a profiled run. `code`: what is measured ("cell", "script")."""
    return (
        _whole_number("--steps", 1, f"stop the {code} cleanly after N steps"),
        _whole_number("--warmup", 0, "exclude the first N steps as warm-up (default: 1 to 3, by run length)"),
        _whole_number("--trace-steps", 1, "trace N steps with the profiler (default: up to 5)"),
        _switch("--no-trace", "no PyTorch profiler: step times and curves, but no step breakdown"),
        _switch("--whole", "trace from the first line, for code without training steps"),
        _switch("--no-live", f"show nothing while the {code} runs: no live view, no alerts"),
        _switch("--no-save", "do not save the run to disk"),
        _option(
            "--device",
            default=device,
            metavar="DEV",
            help="auto, cpu, cuda or cuda:N (default: auto)",
            values=("auto", "cpu", "cuda"),
        ),
    )


_ONLY_RANKS = _option(
    "--only-ranks",
    type=only_ranks_type,
    metavar="0,last,slowest",
    help="keep traces of these ranks only: numbers, last, or slowest (the rank that the others wait for); the other "
    "ranks keep steps and curves",
)
_STORE = _path("--store", "DIR", "folder of the runs (default: $GPULAB_DIR/runs, else .gpulab/runs)")
_VIEW = (
    _switch("--all", "show everything, not only the first screen"),
    _path("--html", "FILE", "write it as one self-contained page"),
    _switch("--json", "print the figures as JSON"),
)
_SINCE = _text("--since", "WHEN", "a date (2026-11-20) or an age (30m, 2h, 3d, 1w)")
_CONDITIONS = (
    _text("--name", "NAME", "of this name, or 'resnet*'"),
    _text("--device", "DEV", "on cpu or cuda", ("cpu", "cuda")),
    _SINCE,
    _text(
        "--outcome",
        "WORD",
        "completed, stopped, interrupted or failed",
        ("completed", "stopped", "interrupted", "failed"),
    ),
    _text("--text", "WORD", "that contain this word"),
    _STORE,
)
_RUN = "a run by id (or a prefix of it), name, folder, -1 for the newest, or latest"
_RESTORED = "Weights, optimizer, random numbers and data order are restored before each run and at the end."

PROFILE = Command(
    "%%gpuprofile",
    "profile a training cell: a live view while it runs, then a report with a step breakdown",
    "",
    (
        _words("name", "NAME", "a name for the run"),
        *_run_options("cell"),
        _settings("--set", "run with this setting changed; repeat for several"),
        _settings("--ab", "compare the changed cell with the unchanged one, the baseline"),
        _option(
            "--sweep",
            action="append",
            metavar="NAME=A,B,C",
            help="compare several values; two sweeps form a grid",
            values="sweep",
        ),
        _whole_number("--pairs", 1, "pairs of blocks to measure (default: as many as fit the budget, at most 30)"),
        _seconds(
            f"total time of a comparison (default: {DEFAULT_BUDGET_S:g}, plus {FURTHER_BUDGET_S:g} for each further "
            "setting); when it is used up, the result so far stands"
        ),
        _whole_number("--seeds", 0, "also run the baseline with N other seeds, to show how much the loss varies"),
        _whole_number("--ranks", 1, "run the cell in N new processes, as torchrun does, and report on all ranks"),
        _ONLY_RANKS,
        _option("--on", choices=("slurm",), help="run the ranks as a cluster job, submitted from a login node"),
        _whole_number("--nodes", 1, "number of cluster nodes (default: 1)"),
        _whole_number("--time", 1, "time limit of the cluster job in minutes (default: 10)"),
        _option("--sbatch", metavar="OPTIONS", help="options for sbatch, e.g. '--partition=gpu --gres=gpu:2'"),
        _switch("--all", "show the whole report, not only its first screen"),
        _option("-r", "--return", dest="give", action="store_true", help="return the run instead of the cell's value"),
    ),
    usage="[NAME] [options]",
    more="""\
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
Files that the cell writes are not restored. The comparison is also gpulab.experiments[-1].""",
)

COMMANDS = (
    Command(
        "record",
        "profile a script",
        "gpulab.cli.record:record",
        (
            _option("-m", dest="module", action="store_true", help="run a module, as python -m does"),
            _option("--name", default="", help="a name for the run (default: the script's)"),
            _settings("--set", "run with this setting changed"),
            _settings("--ab", "compare the changed script with the unchanged one, the baseline"),
            _whole_number("--pairs", 1, "with --ab: pairs of blocks to measure (default: as many as fit the budget)"),
            _seconds(f"with --ab: total time of the comparison (default: {DEFAULT_BUDGET_S:g})"),
            _whole_number("--ranks", 1, "run the script in N processes, as torchrun does, and report on all ranks"),
            _ONLY_RANKS,
            *_run_options("script", "auto"),
            _path("--html", "FILE", "also write the report as one self-contained page"),
            _path("--json", "FILE", "also write the figures as JSON"),
            _switch("--all", "print everything, not only the first 25 lines"),
            # for a cell in several ranks: the source of what it reads from the notebook; ranks print no report
            _option("--before", type=Path, help=argparse.SUPPRESS),
            _switch("--silent", argparse.SUPPRESS),
            _option("--plan", type=Path, help=argparse.SUPPRESS),
            _switch("--with-launcher", argparse.SUPPRESS),
            _option("script", metavar="SCRIPT", help="the Python file to run; after -m a module"),
            _option("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments"),
        ),
        "terminal",
        "[options] (SCRIPT | -m MODULE) [ARGS ...]",
    ),
    Command(
        "report",
        "show the report of a stored run, a trace file or a folder of traces",
        "gpulab.api.stored:report_stored",
        (
            _words(
                "run",
                "RUN",
                f"{_RUN} (default). Or a torch.profiler trace (.json, .json.gz), or a folder with one trace per rank",
                "runs",
            ),
            *_VIEW,
            _STORE,
        ),
        usage="[options] [RUN]",
    ),
    Command(
        "compare",
        "compare stored runs or traces with the first one",
        "gpulab.api.stored:compare_stored",
        (
            _option("runs", nargs="+", metavar="RUN", help="two or more runs or traces, as for `gpulab report`"),
            *_VIEW,
            _option(
                "--price-per-hour",
                type=price_type("--price-per-hour"),
                metavar="X",
                help="price of the machine: adds the cost per million samples",
            ),
            _option(
                "--fail-if-slower",
                type=share_type("--fail-if-slower"),
                metavar="SHARE",
                help="for CI: exit with status 1 if a run is slower than the first by more than this, e.g. 5%%",
            ),
            _STORE,
        ),
        "terminal",
        "[options] RUN RUN ...",
    ),
    Command(
        "runs",
        "list, filter, rename, delete and export the stored runs",
        "gpulab.api.runs_command:list_runs",
        (
            _words("words", "WORD", "only runs that contain these words"),
            _switch("--all", "all runs, not only the newest 20"),
            *_CONDITIONS,
        ),
        usage="[options] [WORD ...]",
        verbs=(
            Command(
                "name",
                "rename a run",
                "gpulab.api.runs_command:name_run",
                (_words("words", "RUN NEW", "a run and its new name", "runs"), _STORE),
                usage="RUN NEW",
            ),
            Command(
                "delete",
                "show what would be deleted; with --yes, delete it",
                "gpulab.api.runs_command:delete_runs",
                (_words("keys", "RUN", _RUN, "runs"), _switch("--yes", "delete them"), *_CONDITIONS),
                usage="(RUN ... | options) [--yes]",
            ),
            Command(
                "export",
                "write a table of runs, or curves as TensorBoard scalars",
                "gpulab.api.runs_command:export_runs",
                (
                    _words("file", "FILE", ".csv, .json or .parquet: one row per run"),
                    _option("--tensorboard", metavar="FOLDER", help="the curves as TensorBoard scalars instead"),
                    *_CONDITIONS,
                ),
                usage="(FILE | --tensorboard FOLDER) [options]",
            ),
        ),
    ),
    Command(
        "watch",
        "show the ranks of a running job live: which rank waits for which",
        "gpulab.api.live_ranks:watch",
        (_option("job", nargs="?", default="", metavar="JOB", help="its id (default: the last to start)"), _STORE),
        "terminal",
        "[options] [JOB]",
    ),
    Command(
        "predict",
        "predict the speedup of a setting from the last run, without running it",
        "gpulab.api.predict:predict_last",
        (_words("settings", "NAME=VALUE", "the settings (default: each that the findings name)", "settings"),),
        "notebook",
        "[NAME=VALUE[,...]]",
        """\
Predicts from the last run of the baseline; nothing runs. Each prediction is a speedup and a range that should contain
the measured one in 19 of 20 cases.

To measure a setting, write above the cell: %%gpuprofile --ab NAME=VALUE
For a script: gpulab record --ab NAME=VALUE SCRIPT""",
    ),
    Command(
        "scoreboard",
        "show how accurate such predictions were on this machine",
        "gpulab.api.predict:show_scoreboard",
        door="notebook",
        more="""\
For each setting: the number of predictions, their median error, and how many measured speedups lay inside the predicted
range. Below: the latest predictions one by one. Undecided comparisons are left out.""",
    ),
    Command(
        "climb",
        "try promising settings on the last profiled cell one by one, keep what is faster",
        "gpulab.api.climb:climb_last",
        (
            _seconds(f"total time (default: {CLIMB_BUDGET_S:g})", CLIMB_BUDGET_S),
            _whole_number("--rungs", 1, "try at most N settings"),
            _whole_number(
                "--seeds",
                0,
                f"runs with other seeds (default: {CLIMB_SEEDS}), only if a setting changes the loss: is that within "
                "seed-to-seed noise?",
                CLIMB_SEEDS,
            ),
            _whole_number("--steps", 1, "counted steps of a block"),
            _whole_number("--pairs", 1, "pairs of blocks of each comparison"),
            _option("--without", action="append", metavar="NAME,...", help="do not try these settings", values="knobs"),
            _option(
                "--allow",
                action="append",
                metavar="NAME,...",
                help="settings that may change the training; batch_size and accumulate are tried only if named here",
                values="knobs",
            ),
            _switch("--no-save", "do not keep the runs on disk"),
        ),
        "notebook",
        more=f"""\
The most promising setting comes first. Each is measured in short interleaved blocks against the cell with the settings
kept so far. When the findings name no more, each other setting that leaves the training unchanged gets a few blocks,
and the fastest one a full try. A setting is kept only if the blocks show a speedup and the loss stays the same. At the
end gpulab prints the edit that makes them permanent.

{_RESTORED}
{STOPPED_BY} The result is also gpulab.climbs[-1].""",
    ),
    Command(
        "headspace",
        "measure the speedup of the last profiled cell with a perfect DataLoader",
        "gpulab.api.experiment:headspace_last",
        (
            _seconds(
                f"total time (default: {DEFAULT_BUDGET_S + FURTHER_BUDGET_S:g}); at its end the result so far stands"
            ),
            _whole_number("--steps", 1, "counted steps of a block"),
            _whole_number("--pairs", 1, "pairs of blocks (default: what fits into the budget, up to 30)"),
        ),
        "notebook",
        more=f"""\
Runs the cell in short interleaved blocks: the baseline, batches already on the device, and files read from disk again.
Their differences are the cost of preparing the data and of fetching it. The speedup with batches on the device is that
of a perfect DataLoader: no change to the loading can give more.

{_RESTORED}
{STOPPED_BY} The result is also gpulab.headspaces[-1].""",
    ),
    Command(
        "memory",
        "show who holds tensor memory in this kernel, and let go of it",
        "gpulab.api.memory:show_memory",
        (
            _option(
                "--free",
                metavar="traceback,out,NAME",
                default="",
                help="let go of the last exception's variables (traceback), of outputs (out), or delete names",
            ),
            *_VIEW,
        ),
        "notebook",
    ),
    Command(
        "fit",
        "find the largest batch size of the last profiled cell that fits into memory",
        "gpulab.bench.cures:fit_last",
        (
            _option("name", nargs="?", metavar="NAME", default="", help="the size to change (default: batch_size)"),
            _option(
                "--free",
                type=share_type("--free"),
                metavar="SHARE",
                default=LEAST_FREE,
                help="share of the free memory to leave (default: 10%%)",
            ),
        ),
        "notebook",
        "[NAME] [options]",
        f"""\
Short runs at smaller sizes show how memory grows; the predicted size is then run to prove it. Below it are settings
that may make the present size fit; a click runs each and measures its price.

{_RESTORED}
{STOPPED_BY}""",
    ),
    Command(
        "panel",
        "open the bench of the last profiled cell: toggle settings, run, compare; needs a notebook",
        "gpulab.bench.opening:open_bench",
        door="notebook",
    ),
    Command(
        "apply",
        "add the cell with the edit of the row open in the bench, as a new cell below",
        "gpulab.bench.opening:apply_edit",
        door="notebook",
    ),
    Command(
        "fleet",
        "show which jobs waste GPUs, and why, across folders of runs",
        "gpulab.api.fleet:show_fleet",
        (
            _words("folders", "FOLDER", "a folder with runs in it or below it (default: the runs of this folder)"),
            _option(
                "--alert",
                type=share_type("--alert"),
                metavar="SHARE",
                help="only jobs whose GPUs are idle for that share or more; exit status 1 if any",
            ),
            _switch("--cpu", "also jobs without a GPU: the CPU is then their device"),
            _text("--user", "NAME", "only jobs of this user"),
            _text("--queue", "NAME", "only jobs of this queue"),
            _text("--day", "DATE", "only jobs of that day (2026-11-20)"),
            _SINCE,
            *_VIEW,
            _path("--export", "FILE", "write one row per job: .csv, .json or .parquet"),
            _STORE,
        ),
        usage="[FOLDER ...] [options]",
    ),
    Command(
        "tensorboard",
        "open the stored runs in TensorBoard with torch-tb-profiler",
        "gpulab.api.tensorboard:open_tensorboard",
        (
            _option("--port", type=port_type, metavar="N", help="default: 6006, or a free port after it"),
            _switch("--stop", "end it; it also ends with this process"),
            _STORE,
        ),
    ),
    Command(
        "doctor",
        "check what gpulab can measure on this machine, and why not the rest",
        "gpulab.api.doctor:examine_machine",
        (_STORE,),
    ),
    Command(
        "lab",
        "copy the guided lessons into your own folder and open them in JupyterLab",
        "gpulab.lessons.editions:open_lessons",
        (
            _option("--lesson", default="00", metavar="NN", help="open this lesson (default: 00, the quick start)"),
            _option(
                "--folder",
                type=Path,
                default=Path("gpulab-lessons"),
                help="where your copies go (default: gpulab-lessons in this folder)",
            ),
            _option(
                "--edition",
                choices=("self-study", "class", "instructor"),
                default="self-study",
                help="solutions collapsed (self-study), left out (class), or filled in (instructor)",
            ),
            _switch("--no-open", "copy only, do not open JupyterLab"),
            _words("args", "JUPYTERLAB OPTIONS", "e.g. -- --no-browser --allow-root"),
        ),
        "terminal",
        "[options] [-- JUPYTERLAB OPTIONS ...]",
    ),
    Command(
        "progress",
        "show your guesses and exercises in the lessons of this folder",
        "gpulab.board.live:show",
        door="notebook",
    ),
    Command(
        "board",
        "show the progress of a class, for its instructor, refreshed every few seconds",
        "gpulab.board.live:show_board",
        (
            _path("folder", "FOLDER", "the class folder", nargs="?"),
            _words("lessons", "LESSON", "only these lessons"),
            _path("--html", "FILE", "write it as a page"),
            _switch("--stop", "end the board that is shown"),
        ),
        "notebook",
        "FOLDER [LESSON ...] [options]",
    ),
)


def at(door: Door) -> list[Command]:
    """The commands that exist in a notebook, or at a terminal."""
    return [command for command in COMMANDS if command.door in ("both", door)]
