"""Lesson 13: a fleet that is really recorded, two trainings on a core, the model of a shared device, exercises."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpulab.analysis.fleet import FleetJob
from gpulab.errors import GpulabError
from gpulab.lessons import sharing
from gpulab.lessons.check import Note
from gpulab.lessons.guesses import reveal
from gpulab.lessons.sharing import (
    MOST_BUSY,
    Shared,
    array_script,
    check_hours,
    check_together,
    check_worst,
    draw_shared,
    first_fit,
    hours,
    jobs_of,
    jobs_table,
    record_jobs,
    share_core,
)
from gpulab.lessons.sharing_process import WAITING, Stretch
from gpulab.store.folders import Store
from tests.support.fork_server import python_with_torch

JOB = """
import sys, time
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = [torch.randn(8) for _ in range(64)]
for batch in torch.utils.data.DataLoader(dataset, batch_size=int(sys.argv[1])):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


def own_children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = own_children()
    yield
    assert own_children() <= before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a space in its name, as learners have it; the lesson's own fleet is looked for there."""
    place = tmp_path / "my lessons"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


# -- the fleet ---------------------------------------------------------------------------------------------------------


def test_jobs_are_recorded_each_in_its_own_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", python_with_torch())
    (folder / "my job.py").write_text(JOB)
    mine = folder / "fleet" / "other" / ".gpulab" / "runs" / "mine"
    mine.mkdir(parents=True)
    record_jobs("fleet", {"small": "'my job.py' 4", "other": "'my job.py' 8"})
    assert mine.is_dir(), "a folder that is not the lesson's stays"
    assert capsys.readouterr().out == "2 jobs recorded in fleet: small, other\n"
    assert [(job.name, job.gpus) for job in jobs_of()] == [("small", 1), ("other", 1)]
    assert [line.split()[0] for line in jobs_table().lines] == ["job", "small", "other"]  # type: ignore[union-attr]
    [before] = Store(folder / "fleet" / "small" / ".gpulab" / "runs").list()
    record_jobs("fleet", {"small": "'my job.py' 8"})
    [after] = Store(folder / "fleet" / "small" / ".gpulab" / "runs").list()
    assert before.id != after.id, "recorded anew, not twice"
    with pytest.raises(GpulabError, match="The job none failed"):
        record_jobs("fleet", {"none": "no-such-script.py"})


def test_without_jobs_there_is_nothing_to_judge(folder: Path) -> None:
    assert jobs_of() == [] and isinstance(jobs_table(), Note)
    assert check_worst("nightly").state == "unanswered"
    assert reveal(50, sharing.QUESTIONS["wasted"]).closeness == "not measured"


def a_job(name: str, wall_s: float, idle: float) -> FleetJob:
    empty: dict[str, Any] = dict.fromkeys(FleetJob.__struct_fields__, "")
    hours = wall_s / 3600
    given = {"id": name, "name": name, "created": name, "ranks": 1, "world_size": 1, "gpus": 1, "wall_s": wall_s}
    wasted = {"gpu_hours": hours, "wasted_gpu_hours": hours * idle, "idle_fraction": idle, "at_least": False}
    return FleetJob(**{**empty, **given, **wasted, "rank": None, "runs": (name,)})


JOBS = [a_job("probe", 10.0, 0.9), a_job("nightly", 30.0, 0.6), a_job("large", 40.0, 0.1), a_job("twin", 18.0, 0.99)]


@pytest.mark.parametrize(
    ("answer_", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        ("mightly", "wrong", "none of the jobs: probe, nightly, large"),
        ("nightly", "right", "The largest share, 99 %, is that of twin"),
        ("twin", "right", "17.8 s wasted"),
        ("probe", "wrong", "9.00 s wasted. Another job wastes more: multiply"),
        ("large", "wrong", "multiply"),
    ],
)
def test_the_worst_job_is_judged_by_recordings(
    monkeypatch: pytest.MonkeyPatch, answer_: object, state: str, hint: str
) -> None:
    monkeypatch.setattr(sharing, "jobs_of", lambda: JOBS)
    checked = check_worst(answer_)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_the_largest_share_is_not_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "jobs_of", lambda: JOBS[:3])
    assert "how long did it hold the device?" in check_worst("probe").hint
    measured = reveal(40, sharing.QUESTIONS["wasted"]).measured
    assert measured == pytest.approx(100 * (9 + 18 + 4) / 80)


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
def test_each_task_of_the_array_runs_its_own_job(tmp_path: Path) -> None:
    jobs = {"a": "train.py --width 32", "b c": "train.py --width 64 'two words'", "d": "train.py"}
    script = tmp_path / "array.sh"
    script.write_text(array_script(jobs, gres="gpu:1g.20gb:1", at_once=2))
    assert "#SBATCH --array=0-2%2\n#SBATCH --gres=gpu:1g.20gb:1\n" in script.read_text()
    stub = 'srun() { printf "%s|" "$@"; }; . ' + script.name
    said = [
        subprocess.run(
            ["bash", "-c", stub],
            cwd=tmp_path,
            env={**os.environ, "SLURM_ARRAY_TASK_ID": str(task)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for task in range(3)
    ]
    assert said[0] == "gpulab|record|--name|a|train.py|--width|32|"
    assert said[1] == "gpulab|record|--name|b c|train.py|--width|64|two words|"
    assert said[2] == "gpulab|record|--name|d|train.py|"


# -- two trainings on one core -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_two_trainings_share_a_core_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = own_children()
    figure = share_core(turns=2, seconds=0.05)
    assert not isinstance(figure, Note) and own_children() <= before
    assert set(sharing._shared) == {"starved", "busy"}
    for one in sharing._shared.values():
        assert len(one.alone) == len(one.together) == 2 and one.times.times > 0
    assert sharing.QUESTIONS["busy-pair"].measure() == sharing._shared["busy"].times
    monkeypatch.delattr(os, "sched_setaffinity")
    assert "cannot keep a process on one core" in share_core().words  # type: ignore[union-attr]
    assert reveal(2, sharing.QUESTIONS["starved-pair"]).closeness == "not measured", "of the last time"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_trainings_end_with_the_block_that_fails() -> None:
    core = min(os.sched_getaffinity(0))
    with sharing._trainings(core) as pair:
        pids = {process.pid for process in pair}
        assert all(psutil.Process(pid).cpu_affinity() == [core] for pid in pids)
        with pytest.raises(GpulabError, match="ended before"):
            sharing._ran(pair, "no-such-kind", 0.1)
    assert not pids & own_children()


def stretch(per_s: float, cpu: float, asleep: float = 0.0) -> Stretch:
    return Stretch(round(10 * per_s), 10.0, 10 * cpu, 10 * asleep)


def shared(kind: str, alone: Stretch, *both: Stretch) -> Shared:
    return Shared(kind, (alone,) * 6, ((both[0], both[-1]),) * 6)


BUSY = shared("busy", stretch(100, 0.99), stretch(50, 0.5))
STARVED = shared("starved", stretch(30, 0.3, 0.7), stretch(29, 0.3, 0.68))


def test_ratios_are_of_both_together_to_one_alone() -> None:
    assert BUSY.times.times == pytest.approx(1.0) and BUSY.times.sure
    assert STARVED.times.times == pytest.approx(58 / 30) and STARVED.times.sure
    assert STARVED.busy_fraction == pytest.approx(0.3) and 1 - STARVED.busy_fraction == pytest.approx(WAITING)


@pytest.mark.parametrize(
    "disturbed",
    [
        shared("busy", stretch(50, 0.5), stretch(30, 0.3)),
        shared("busy", stretch(100, 0.99), stretch(30, 0.3)),
        shared("starved", stretch(20, 0.2, 0.5), stretch(20, 0.2, 0.5)),
        Shared("busy", (stretch(100, 0.99),) * 2, ((stretch(50, 0.5),) * 2, (stretch(90, 0.5),) * 2)),
    ],
)
def test_a_core_that_others_take_decides_nothing(monkeypatch: pytest.MonkeyPatch, disturbed: Shared) -> None:
    monkeypatch.setitem(sharing._shared, disturbed.kind, disturbed)
    question = sharing.QUESTIONS[f"{disturbed.kind}-pair"]
    assert reveal(1, question).closeness == "undecided"


def test_the_bars_are_the_medians() -> None:
    axes = draw_shared([STARVED, BUSY]).axes[0]
    assert [round(bar.get_width()) for bar in axes.patches] == [30, 29, 29, 100, 50, 50]  # type: ignore[attr-defined]
    assert "measured" in axes.get_xlabel()


# -- the exercises -----------------------------------------------------------------------------------------------------


def test_wasted_hours_are_also_those_of_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "jobs_of", lambda: JOBS)
    assert check_hours(hours).state == "right"
    monkeypatch.setattr(sharing, "jobs_of", lambda: [replace(JOBS[0], wasted_gpu_hours=1.0)])
    assert "For probe it gives" in check_hours(hours).hint


def test_an_answer_that_empties_the_jobs_is_still_judged() -> None:
    def emptying(jobs: dict[str, tuple[float, float]], most: float) -> list[list[str]]:
        groups = first_fit(jobs, most)
        jobs.clear()
        return groups

    assert check_together(emptying).state == "right"


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.floats(0.01, MOST_BUSY), st.floats(0.01, 1.0)), max_size=12))
def test_first_fit_gives_no_device_too_much(jobs: dict[str, tuple[float, float]]) -> None:
    groups = first_fit(jobs, MOST_BUSY)
    assert sharing._problem(groups, jobs) == ""
    assert sorted(name for group in groups for name in group) == sorted(jobs)
