"""Ranks that a recorded script starts itself are recorded too, and end in one report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpulab.launch.launcher import FOLLOW, followed_ranks
from gpulab.store.folders import Store
from gpulab.store.jobs import job_of
from tests.support.fork_server import python_with_torch

LIGHTNING = """
import sys, torch, lightning as L
from torch.utils.data import DataLoader, TensorDataset
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
if __name__ == "__main__":
    data = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=2)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    trainer.fit(Net(), data)
    sys.stdout.write(f"arguments {sys.argv[1:]} {trainer.global_rank}\\n")
"""
OWN_TORCHRUN = """
import subprocess, sys
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", sys.argv[1]]
sys.exit(subprocess.run(command).returncode)
"""
TRAINING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(30):
    weight.sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
dist.destroy_process_group()
"""


def record(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(text)
    command = [python_with_torch(), "-m", "gpulab", "record", "--no-live", str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_lightnings_own_ranks_are_one_job(tmp_path: Path, own_store: Path) -> None:
    said = record(tmp_path, LIGHTNING, "--lr", "1")
    assert said.returncode == 0, said.stderr
    assert "arguments ['--lr', '1'] 0" in said.stdout and "arguments ['--lr', '1'] 1" in said.stdout
    runs = Store(own_store / "runs")
    (job_id,) = {entry.job.id for entry in runs.list() if entry.job is not None}
    job = job_of(runs, job_id)
    assert set(job.runs) == {0, 1} and not job.problems, job.problems
    assert said.stderr.count("2 of 2 ranks") == 1


def test_a_torchrun_of_the_scripts_own_is_one_job(tmp_path: Path, own_store: Path) -> None:
    (tmp_path / "ranks.py").write_text(TRAINING)
    said = record(tmp_path, OWN_TORCHRUN, str(tmp_path / "ranks.py"))
    assert said.returncode == 0, said.stderr
    runs = Store(own_store / "runs")
    (job_id,) = {entry.job.id for entry in runs.list() if entry.job is not None}
    assert set(job_of(runs, job_id).runs) == {0, 1}
    assert said.stderr.count("gpulab · ") == 1 and "2 of 2 ranks" in said.stderr, "one report, of the ranks"
    assert "the ranks that the script has started are recorded" in said.stderr


def test_other_processes_are_left_as_they_are(tmp_path: Path, own_store: Path) -> None:
    (tmp_path / "tool.py").write_text("import os, sys; print('tool', sys.argv[1:], os.environ.get('LOCAL_RANK'))")
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.of_the_user = 5")
    script = """
import os, subprocess, sys
os.environ["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
for more in ({}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}):
    subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), "tool.py"), "7"], env=os.environ | more)
    subprocess.run([sys.executable, "-c", "print(of_the_user)"], env=os.environ | more)
"""
    said = record(tmp_path, script)
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("tool ['7']") == 3 and said.stdout.count("5\n") == 3, said.stdout
    assert len(Store(own_store / "runs").list()) == 2, "the script, and what says that it is rank 1"


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"PYTHONPATH": "/a", "HOME": "/h"}
    environment = dict(before)
    with followed_ranks(["--no-live"], {"JOB": "job"}, environment):
        assert environment[FOLLOW] == "--no-live" and environment["JOB"] == "job"
        assert environment["PYTHONPATH"].endswith("follow:/a")
    assert environment == before
    rank = before | {"LOCAL_RANK": "0"}
    with followed_ranks(["--no-live"], {"JOB": "job"}, rank):
        assert FOLLOW not in rank


def test_a_path_that_the_code_sets_itself_stays() -> None:
    environment = {"PYTHONPATH": "/a"}
    with followed_ranks([], {}, environment):
        environment["PYTHONPATH"] += os.pathsep + "/b"
    assert environment == {"PYTHONPATH": os.pathsep.join(("/a", "/b"))}
    with followed_ranks([], {}, environment):
        del environment["PYTHONPATH"]
    assert environment == {}
    with followed_ranks([], {}, environment):
        assert environment["PYTHONPATH"].endswith("follow")
    assert environment == {}
