"""Cells and scripts on a real Slurm cluster of three nodes: submitted, watched, stopped, killed, refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulab.errors import UsageError
from gpulab.launch.slurm import Allocation, Job, Submitted, batch_script, poll, submit, submit_words
from gpulab.store.folders import Store
from gpulab.store.jobs import job_of
from tests.api.test_cell_ranks import SETUP
from tests.api.test_ranked_experiment import DDP
from tests.cli.test_ranks import TRAINING
from tests.support.kernel_session import KernelSession, kernel
from tests.support.slurm_cluster import CannotRun, cluster


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    try:
        with cluster(tmp_path_factory.mktemp("slurm")) as environment:
            yield environment
    except CannotRun as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def session(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("login"), env=slurm) as started:
        answer = started.run(SETUP)
        assert answer.status == "ok", answer.error
        yield started


@pytest.fixture
def on_path(slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)


def texts(session: KernelSession, code: str) -> str:
    answer = session.run(code)
    assert answer.status == "ok", answer.error
    return "\n".join([answer.stdout, *(display["text/plain"] for display in answer.displays())])


@pytest.mark.slow("two nodes of two ranks, each node with a launcher of its own")
def test_a_cell_on_two_nodes_ends_in_one_report(session: KernelSession) -> None:
    said = texts(session, "%%gpuprofile --on slurm --nodes 2 --ranks 2 --time 5\ntrain(60)")
    assert "#SBATCH --nodes=2" in said and "srun" in said, "what is submitted is shown"
    assert "[rank 0] half way 0" in said and "[rank 1] half way 1" in said
    assert "2 of 2 ranks" in said and "Rank 1 arrives last" in said and "time.sleep(late_s)" in said
    job = session.value("[gpulab.runs[-1].job.launcher, gpulab.runs[-1].job.queue, gpulab.runs[-1].job.world_size]")
    assert job == ["torchrun", "debug", 2]
    assert not (session.folder / "store" / "jobs").exists()


def test_stop_cancels_and_keeps_the_runs(session: KernelSession) -> None:
    running = session.begin("%%gpuprofile --on slurm --ranks 2 --time 5\ntrain(1_000_000)")
    session.wait(running, lambda a: "half way 1" in a.stdout and "half way 0" in a.stdout)
    session.interrupt()
    answer = session.finish(running)
    assert answer.error is not None and answer.error[0] == "Interrupted"
    assert session.value("[gpulab.runs[-1].job.rank, gpulab.runs[-1].outcome]") in ([0, "interrupted"], [0, "failed"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--on slurm --ranks 3 --nodes 2", "--ranks 3 is not a multiple of --nodes 2"),
        ("--on slurm --sbatch=--partition=none", "Slurm rejected the job"),
        ("--on slurm --sbatch=--bogus", "Slurm rejected the job"),
        ("--nodes 2", "--nodes needs a cluster"),
        ("--on slurm --no-save", "--no-save and --on cannot be combined"),
        ("--on slurm --ab later_s=2", "later_s is neither a setting nor a variable of the code"),
        ("--on kubernetes", "--on"),
    ],
)
def test_what_slurm_refuses_is_in_its_words(session: KernelSession, line: str, words: str) -> None:
    answer = session.run(f"%%gpuprofile {line}\ntrain(1)")
    assert words in " ".join(answer.stderr.split()), answer.stderr
    assert not (session.folder / "store" / "jobs").exists()


@pytest.mark.slow("a job array: each setting starts two ranks that import torch")
def test_a_sweep_is_one_array_and_one_comparison(session: KernelSession) -> None:
    assert session.run(DDP).status == "ok"
    cell = "%%gpuprofile --on slurm --ranks 2 --sweep late_s=0.0,0.3 --pairs 4\ntrain_ddp(40, False, late_s)"
    said = texts(session, cell)
    assert "#SBATCH --array=0-1" in said and "late_s=0.0" in said and "late_s=0.3" in said
    shown = session.value("[[c.verdict, c.pairs, c.evidence] for c in gpulab.experiments[-1].comparisons]")
    assert shown == [["faster", 4, "interleaved"], ["slower", 4, "interleaved"]]
    ids = session.value("[side.facts.run.job.id for side in gpulab.experiments[-1].result.sides]")
    assert len(set(ids)) == 3 and all(".0-cell-" in i for i in ids), "each full run is a job of its own"
    assert not (session.folder / "store" / "jobs").exists()


def test_a_folder_with_a_space_and_two_words(session: KernelSession) -> None:
    session._silent("import os; os.environ['GPULAB_DIR'] = os.path.join(os.getcwd(), 'a store')")
    try:
        said = texts(session, """%%gpuprofile --on slurm --ranks 2 --sbatch "--comment='two words'"\ntrain(30)""")
    finally:
        session._silent(f"os.environ['GPULAB_DIR'] = {str(session.folder / 'store')!r}")
    assert "2 of 2 ranks" in said


def test_a_script_under_srun_joins_by_itself(on_path: None, tmp_path: Path, own_store: Path) -> None:
    script = tmp_path / "train.py"
    of_the_task = (
        "import os\n"
        "for name, of in (('RANK', 'PROCID'), ('WORLD_SIZE', 'NTASKS')): os.environ[name] = os.environ[f'SLURM_{of}']\n"
        "os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29731'}\n"
    )
    script.write_text(of_the_task + TRAINING)
    command = ["srun", "-N2", "-n2", sys.executable, "-m", "gpulab", "record", "--no-live", str(script), "30"]
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    assert said.returncode == 0, said.stderr
    assert said.stderr.count("2 of 2 ranks") == 1, "rank 0 speaks"
    (job_id,) = {entry.job.id for entry in Store(own_store / "runs").list() if entry.job is not None}
    assert set(job_of(Store(own_store / "runs"), job_id).runs) == {0, 1}


# -- without a cluster -------------------------------------------------------------------------------------------------


def test_without_slurm_it_says_where_slurm_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (lambda: submit(["sbatch", "job.sbatch"]), lambda: poll(Submitted("7"))):
        with pytest.raises(UsageError, match="run it on a login node"):
            ask()


def test_the_batch_script_quotes_what_it_is_given(tmp_path: Path) -> None:
    folder = tmp_path / "a folder; rm -rf x"
    asked = Allocation(4, 2, 7, "--gres=gpu:2 --comment='two words'")
    text = batch_script(asked, "job 1", ["-m", "it's"], folder, {"A": "$(x)"})
    assert "#SBATCH --nodes=2" in text and "#SBATCH --time=7" in text and "--nproc-per-node 2" in text
    assert "export A='$(x)'" in text and "'job 1'" in text and f"'{folder}/logs'" in text
    words = submit_words(asked, folder / "100 %" / "job.sbatch")
    assert words[2:5] == [f"--output={folder}/100 %%/output.txt", "--gres=gpu:2", "--comment=two words"]
    with pytest.raises(UsageError, match="no closing quotation"):
        _ = Allocation(1, more="--comment='x").words
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_submitting_imports_no_torch() -> None:
    code = "import gpulab.api.cell_ranks, gpulab.launch.slurm, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_words_of_a_job() -> None:
    assert Job("PENDING", "Resources").words == "pending (Resources)" and Job("OUT_OF_MEMORY").words == "out of memory"
    assert Job("TIMEOUT", "None").is_over and not Job("COMPLETING").is_over
