"""Lesson 13, sharing a GPU: a small fleet of recorded jobs, two trainings on one core, and packing jobs."""

from __future__ import annotations

import math
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from gpulab.analysis.fleet import FleetJob
from gpulab.api.fleet import fleet
from gpulab.devices.own_processes import marked
from gpulab.errors import GpulabError
from gpulab.formatting import duration, percent, plural
from gpulab.launch.launcher import OF_THE_KERNEL
from gpulab.lessons.check import (
    Checked,
    Note,
    Table,
    exercise,
    fault,
    is_close,
    no_number,
    right,
    unanswered,
    wrong,
)
from gpulab.lessons.figures import BLUE, Row, draw_rows, stacked
from gpulab.lessons.guesses import Question, share
from gpulab.lessons.measured import Faster
from gpulab.lessons.sharing_process import KINDS, Stretch
from gpulab.options import is_quick
from gpulab.tuning.compare.statistics import paired
from gpulab.user_code import PACKAGE_FOLDER
from gpulab.views.waiting import waiting

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# -- a fleet of recorded jobs ------------------------------------------------------------------------------------------

FLEET = "fleet"  # the folder of the notebook's jobs
LONGEST_JOB_S = 300.0
COMMAND = "command.txt"  # in a job's folder: only folders with this file are recorded again
CLOSE = 0.05  # if the waste of two jobs differs by less, both are right


def record_jobs(folder: str | Path, jobs: Mapping[str, str]) -> None:
    """Record every job, one after the other, as `gpulab record` does, each in its own subfolder of `folder`.

    `jobs`: a script and its options, by the job's name. Jobs that were recorded there before are recorded again. Raises
    GpulabError for a job that fails, with its last output.
    """
    with waiting(f"recording {plural(len(jobs), 'job')}") as wait:
        for count, (name, command) in enumerate(jobs.items()):
            wait.tell(count / len(jobs))
            _record(Path(folder) / name, name, command)
    print(f"{plural(len(jobs), 'job')} recorded in {folder}: {', '.join(jobs)}")


def _record(place: Path, name: str, command: str) -> None:
    if (place / COMMAND).is_file():
        shutil.rmtree(place / ".gpulab", ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    (place / COMMAND).write_text(f"{command}\n", encoding="utf-8")
    words = [sys.executable, "-m", "gpulab", "record", "--name", name, *shlex.split(command)]
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_KERNEL}
    environment |= {"GPULAB_DIR": str((place / ".gpulab").absolute()), "OMP_NUM_THREADS": "1", **_import_path()}
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST_JOB_S, env=environment
        )
    except subprocess.TimeoutExpired:
        raise GpulabError(
            f"The job {name} did not end within {LONGEST_JOB_S:g} seconds: give it fewer steps."
        ) from None
    if done.returncode:
        raise GpulabError(f"The job {name} failed: {(done.stderr or done.stdout).strip()[-800:]}")


def _import_path() -> dict[str, str]:
    """The variable that makes a new Python import this gpulab, wherever it starts."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE_FOLDER.parent), before)))}


def jobs_of(folder: str | Path = FLEET) -> list[FleetJob]:
    """The jobs of a fleet in order of their begin; empty if none is recorded or measured."""
    with suppress(GpulabError):
        return sorted(fleet(folder, cpu=True).jobs, key=lambda job: job.created)
    return []


def jobs_table(folder: str | Path = FLEET) -> Table | Note:
    """How long each job held its device, and the share of its steps in which the device idled."""
    jobs = jobs_of(folder)
    if not jobs:
        return Note("Not measured.", f"There is no job in {str(folder)!r} yet: run the cell that records them first.")
    rows = [(job.name, duration(job.wall_s * 1e6), percent(job.idle_fraction)) for job in jobs]
    return Table.of(("job", "held the device for", "idle"), rows)


def array_script(jobs: Mapping[str, str], gres: str, at_once: int, minutes: int = 60) -> str:
    """A batch file for `sbatch`: an array with a task per job, each on resource `gres`, at most `at_once` running."""
    lines = [
        "#!/bin/bash",
        "#SBATCH --job-name=fleet",
        f"#SBATCH --array=0-{len(jobs) - 1}%{at_once}",
        f"#SBATCH --gres={gres}",
        "#SBATCH --cpus-per-task=4",
        f"#SBATCH --time={minutes}",
        "",
        "case $SLURM_ARRAY_TASK_ID in",
        *(f"  {task}) srun gpulab record --name {shlex.quote(name)} {jobs[name]} ;;" for task, name in enumerate(jobs)),
        "esac",
        "",
    ]
    return "\n".join(lines)


# -- two trainings on one core -----------------------------------------------------------------------------------------

TURNS, TURN_S = 6, 0.7
QUICK_TURNS, QUICK_TURN_S = 2, 0.15
LEAST_CPU, MOST_WAITED = 0.9, 0.1  # shares of the time: otherwise other programs took the core
WIDEST = 1.35  # the upper end of an interval over its lower one


class Shared(Struct, frozen=True):
    """One kind of training, alone and two at once on the same core, measured in turn."""

    kind: str
    alone: tuple[Stretch, ...]
    together: tuple[tuple[Stretch, Stretch], ...]

    @property
    def busy_fraction(self) -> float:
        """The share of its time in which the training computes when alone."""
        return float(np.median([one.cpu_s / one.wall_s for one in self.alone]))

    @property
    def times(self) -> Faster:
        """The ratio of steps per second of both together over one alone."""
        ratios = np.array(
            [(a.per_s + b.per_s) / one.per_s for one, (a, b) in zip(self.alone, self.together, strict=True)]
        )
        estimate = paired(ratios)
        assert estimate is not None
        low, high = estimate.interval or (0.0, math.inf)
        sure = low > 0 and high / low <= WIDEST and not self.is_disturbed
        return Faster(estimate.ratio, sure, estimate.interval)

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took the core: one alone waited for it, or both together did not get all of it."""
        waited = float(np.median([one.waited_fraction for one in self.alone]))
        got = float(np.median([(a.cpu_s + b.cpu_s) / max(a.wall_s, b.wall_s) for a, b in self.together]))
        return waited > MOST_WAITED or (self.kind == "busy" and got < LEAST_CPU)


_shared: dict[str, Shared] = {}


def share_core(turns: int = TURNS, seconds: float = TURN_S) -> Figure | Note:
    """Train on one core, alone and two at once, in turn, and draw the steps per second of both."""
    _shared.clear()
    if is_quick():
        turns, seconds = QUICK_TURNS, QUICK_TURN_S
    if not hasattr(os, "sched_setaffinity"):
        return Note("Not measurable here.", "This system cannot keep a process on one core; Linux can.")
    with waiting("two trainings on one core") as wait, _trainings(_idlest_core()) as pair:
        for count, kind in enumerate(KINDS):
            alone, together = [], []
            for turn in range(turns):
                wait.tell((count + turn / turns) / len(KINDS))
                alone.append(_ran(pair[:1], kind, seconds)[0])
                a, b = _ran(pair, kind, seconds)
                together.append((a, b))
            _shared[kind] = Shared(kind, tuple(alone), tuple(together))
    return draw_shared(list(_shared.values()))


def _idlest_core() -> int:
    import psutil

    usable = sorted(os.sched_getaffinity(0))
    used = psutil.cpu_percent(interval=0.3, percpu=True)
    return min(usable, key=lambda core: used[core] if core < len(used) else 0.0)


@contextmanager
def _trainings(core: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that wait for requests and end with the block."""
    words = [sys.executable, "-m", "gpulab.lessons.sharing_process", str(core)]
    environment = marked() | {"OMP_NUM_THREADS": "1", **_import_path()}
    pipe = subprocess.PIPE
    pair: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            pair.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment))
        for process in pair:
            _line(process)  # "ready"
        yield pair
    finally:
        for process in pair:
            process.kill()
            process.communicate()


def _ran(pair: Sequence[subprocess.Popen[str]], kind: str, seconds: float) -> list[Stretch]:
    for process in pair:
        assert process.stdin is not None
        process.stdin.write(f"{kind} {seconds}\n")
        process.stdin.flush()
    return [msgspec.json.decode(_line(process), type=Stretch) for process in pair]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise GpulabError("A training ended before it was asked to: run the cell again.")
    return line


_KIND_WORDS = {"starved": "starved: waits for data", "busy": "busy: only computes"}


def draw_shared(measured: Sequence[Shared]) -> Figure:
    """Steps per second by kind: alone, and two at once, one on top of the other."""
    rows = []
    for one in measured:
        alone = float(np.median([stretch.per_s for stretch in one.alone]))
        a, b = (float(np.median([both[i].per_s for both in one.together])) for i in (0, 1))
        computes = f"{alone:.0f}; computes {percent(one.busy_fraction)} of its time"
        rows.append(Row(f"{_KIND_WORDS[one.kind]}\nalone", stacked([(alone, BLUE)]), computes))
        rows.append(Row("two at once", stacked([(a, BLUE), (b, "#8FB4DA")]), f"{a:.0f} + {b:.0f}"))
    return draw_rows(rows, "Two trainings on one core", "steps per second on one core (measured)")


# -- the exercises -----------------------------------------------------------------------------------------------------


@exercise("Put the name of a job, in quotes, in place of the dots, then run that cell and this one again.")
def check_worst(worst_job: object) -> Checked:
    """Whether `worst_job` of the fleet wasted most device time, by the learner's own recordings."""
    jobs = {job.name: job for job in jobs_of()}
    if len(jobs) < 2:
        return unanswered("The jobs are not recorded yet: run the cell that records them first.")
    if worst_job not in jobs:
        return wrong(f"{worst_job!r} is none of the jobs: {', '.join(jobs)}.")
    answer = jobs[str(worst_job)]
    wasted = {name: job.wasted_gpu_hours or 0.0 for name, job in jobs.items()}
    highest = max(jobs.values(), key=lambda job: job.idle_fraction or 0.0)
    product = f"{duration(answer.wall_s * 1e6)} × {percent(answer.idle_fraction)}"
    words = f"{answer.name}: {product} = {duration(wasted[answer.name] * 3600e6)} wasted."
    share = percent(highest.idle_fraction)
    if wasted[answer.name] >= (1 - CLOSE) * max(wasted.values()):
        more = f" The largest share, {share}, is that of {highest.name}, which held it for less."
        return right(words + (more if highest.name != answer.name else ""))
    if answer.idle_fraction == highest.idle_fraction:
        return wrong(f"{words} Its share is the largest, but how long did it hold the device? Another job wastes more.")
    return wrong(f"{words} Another job wastes more: multiply how long each held the device by its idle share.")


_HOURS_CASES = ((1, 3600.0, 0.5), (4, 3600.0, 0.5), (8, 36000.0, 0.25), (2, 90.0, 0.0), (1, 7200.0, None))


def hours(gpus: int, wall_s: float, idle_fraction: float | None) -> float | None:
    """GPU hours in which a job's GPUs idled; None if not measurable."""
    return None if idle_fraction is None else gpus * wall_s / 3600 * idle_fraction


@exercise()
def check_hours(wasted_gpu_hours: Callable[..., Any]) -> Checked:
    """Whether `wasted_gpu_hours(gpus, wall_s, idle_fraction)` is what fleet computes; None stays None."""

    def answer(*case: Any) -> object:
        try:
            return wasted_gpu_hours(*case)
        except TypeError:
            if case[2] is not None:
                raise
            return "a TypeError"

    def form(got: object, expected: float | None) -> str:
        if expected is not None:
            return no_number(got, expected)
        is_none = f"A job whose idle share is None: it gives {got!r}. What is not measurable is not 0, and stays None."
        return "" if got is None else is_none

    words = fault(
        answer,
        hours,
        _HOURS_CASES,
        (
            ("That is the time in which they worked.", lambda g, s, i: g * s / 3600 * (1 - (i or 0.0))),
            ("Those are seconds: an hour has 3,600.", lambda g, s, i: g * s * (i or 0.0)),
            ("A job holds all its GPUs: each counts.", lambda g, s, i: s / 3600 * (i or 0.0)),
        ),
        otherwise="GPUs × hours × idle share.",
        name="wasted_gpu_hours",
        form=form,
        same=lambda got, expected: got == expected if None in (got, expected) else is_close(got, expected),
    )
    if words:
        return wrong(words)
    for job in jobs_of():
        got = wasted_gpu_hours(job.gpus, job.wall_s, job.idle_fraction)
        if job.ranks == 1 and not math.isclose(got, job.wasted_gpu_hours or 0.0, rel_tol=1e-3, abs_tol=1e-9):
            return wrong(f"For {job.name} it gives {got:g}, and fleet says {job.wasted_gpu_hours:g}.")
    return right("Every GPU counts for as long as the job held it: eight GPUs that idle a quarter of ten hours are 20.")


Demand = tuple[float, float]  # busy share, memory, both as a share of the device
MOST_BUSY = 0.9
_FLEETS = 200


@exercise()
def check_together(put_together: Any) -> Checked:
    """Whether `put_together(jobs, most)` groups jobs so that no device is overloaded, on as few as first fit needs."""
    needed = enough = 0
    for jobs in _fleets():
        groups = put_together(dict(jobs), MOST_BUSY)
        problem = _problem(groups, jobs)
        if problem:
            return wrong(problem)
        needed += sum(1 for group in groups if group)
        enough += len(first_fit(jobs, MOST_BUSY))
    if needed > enough:
        return wrong(
            f"No device gets too much, but {_FLEETS} fleets need {needed:,} devices, and {enough:,} are enough. Look "
            "at every device that has room before you take a new one."
        )
    alone = sum(map(len, _fleets()))
    better = sum(len(first_fit(dict(sorted(jobs.items(), key=_largest)), MOST_BUSY)) for jobs in _fleets())
    return right(
        f"{alone:,} jobs on {needed:,} devices. (Largest first, first fit needs {better:,}.)"
        if needed > better
        else f"{alone:,} jobs on {needed:,} devices, as few as first fit with the largest jobs first."
    )


def _largest(item: tuple[str, Demand]) -> float:
    return -max(item[1][0] / MOST_BUSY, item[1][1])


def _fleets() -> list[dict[str, Demand]]:
    """Fixed random demands, each of which fits on a device alone, some exactly."""
    rng = random.Random(13)
    shares = [x / 100 for x in range(5, 91, 5)]
    return [
        {f"job-{number}": (rng.choice(shares), rng.choice(shares)) for number in range(rng.randrange(13))}
        for _ in range(_FLEETS)
    ]


def first_fit(jobs: Mapping[str, Demand], most: float) -> list[list[str]]:
    """The jobs by device, each on the first device that has room for it."""
    devices: list[list[str]] = []
    for name in jobs:
        for device in devices:
            if _fits([*device, name], jobs, most):
                device.append(name)
                break
        else:
            devices.append([name])
    return devices


def _fits(names: Sequence[str], jobs: Mapping[str, Demand], most: float) -> bool:
    busy, memory = (sum(jobs[name][i] for name in names) for i in (0, 1))
    return busy <= most + 1e-9 and memory <= 1 + 1e-9


def _problem(groups: Any, jobs: Mapping[str, Demand]) -> str:
    """What is wrong with an answer; empty if nothing."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple, set)) for group in groups):
        return f"It gives {groups!r}; expected a list with a list of names per device."
    counts = Counter(name for group in groups for name in group)
    for name in jobs:
        if counts[name] != 1:
            return f"Of {len(jobs)} jobs, {name} is on {plural(counts[name], 'device')}: each must be on one."
    if strange := sorted(counts.keys() - jobs):
        return f"It names jobs that are none: {strange[:3]}."
    for group in groups:
        if not _fits(list(group), jobs, MOST_BUSY):
            busy, memory = (sum(jobs[name][i] for name in group) for i in (0, 1))
            too_busy = f"busy shares of {busy:.2f}, and {MOST_BUSY} is the most"
            what = too_busy if busy > MOST_BUSY + 1e-9 else f"{memory:.2f} of its memory"
            return f"One device gets {', '.join(f'{name} {jobs[name]}' for name in group)}: {what}."
    return ""


# -- what the notebook asks --------------------------------------------------------------------------------------------


def _wasted_share() -> float | None:
    jobs = jobs_of()
    total_hours = sum(job.gpu_hours for job in jobs)
    return sum(job.wasted_gpu_hours or 0.0 for job in jobs) / total_hours if total_hours else None


def _times(kind: str) -> Callable[[], Faster | None]:
    return lambda: _shared[kind].times if kind in _shared else None


MANNER = ("{} the steps per second", "")
QUESTIONS: Mapping[str, Question] = {
    "wasted": share(
        "What share of the time that these jobs hold a device is wasted?", _wasted_share, "of the device time is wasted"
    ),
    "starved-pair": Question(
        "How many steps per second do two starved trainings make together, as a multiple of one alone?",
        "times",
        _times("starved"),
        "by two starved trainings on one core",
        MANNER,
    ),
    "busy-pair": Question(
        "And two that only compute?", "times", _times("busy"), "by two busy trainings on one core", MANNER
    ),
}
