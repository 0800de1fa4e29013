"""What people train several ranks with, from a script and from a notebook: all ranks, all steps, one report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gpulab.api.reading import report
from gpulab.run import Ranks
from gpulab.store.folders import Store
from gpulab.store.jobs import job_of
from tests.support.changes import in_turn
from tests.support.fork_server import python_with_torch
from tests.support.kernel_session import Answer, KernelSession, kernel

LAUNCHING = ("gpulab/launch/", "tests/launch/")
STEPS = 12
IMPORTS = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
STEPS = 12

def data():
    return TensorDataset(torch.randn(STEPS * 4, 16), torch.randint(4, (STEPS * 4,)))

def network():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

def epoch(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
DDP = """
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(network())
given = data()
epoch(model, DataLoader(given, batch_size=2, sampler=DistributedSampler(given)))
sys.stdout.write(f"trained {dist.get_rank()}\\n")
dist.destroy_process_group()
"""
FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = network()
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
given = data()
epoch(model, DataLoader(given, batch_size=2, sampler=DistributedSampler(given)))
sys.stdout.write(f"trained {dist.get_rank()}\\n")
dist.destroy_process_group()
"""
ACCELERATE = """
from accelerate import Accelerator, notebook_launcher
models = []  # torch 2.13: who ends with DDP's last work may wait for ever (~ProcessGroupGloo joins, holding the GIL)
def training(batch_size):
    accelerator = Accelerator(cpu=True)
    model, loader = network(), DataLoader(data(), batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    models.append(model)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    sys.stdout.write(f"trained {accelerator.process_index}\\n")
    accelerator.end_training()
"""
LIGHTNING_NET = """
import lightning
class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
LIGHTNING = """
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
trainer.fit(Net(), DataLoader(data(), batch_size=2))
sys.stdout.write(f"trained {trainer.global_rank} {sys.argv[1:]}\\n")
"""
OWN_TORCHRUN = """
import os, subprocess
if "RANK" not in os.environ:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    sys.exit(subprocess.run(start).returncode)
"""
HUGGING_FACE = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(BertConfig(vocab_size=50, **shape))
quiet = dict(report_to=[], save_strategy="no", disable_tqdm=True)
arguments = TrainingArguments(".", per_device_train_batch_size=2, num_train_epochs=1, use_cpu=True, **quiet)
items = [{"input_ids": torch.randint(50, (8,)), "labels": i % 2} for i in range(STEPS * 4)]
trainer = Trainer(model=model, args=arguments, train_dataset=items)
trainer.train()
sys.stdout.write(f"trained {arguments.process_index}\\n")
"""
GPULAB = ["-m", "gpulab", "record", "--no-live"]
BY_GPULAB = [*GPULAB, "--ranks", "2"]
BY_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *GPULAB]


def record(words: Sequence[str], folder: Path, text: str, *arguments: str) -> str:
    """Run it as a script to its end. Returns what was printed."""
    (folder / "train.py").write_text(IMPORTS + text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    said = subprocess.run(
        [python_with_torch(), *words, "train.py", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert said.returncode == 0, said.stderr
    return said.stdout + said.stderr


def check_job(store: Store) -> None:
    """The newest job: both ranks, every step of each, and what they exchange."""
    newest = max((entry for entry in store.list() if entry.job is not None), key=lambda entry: entry.created)
    assert newest.job is not None
    job: Ranks = job_of(store, newest.job.id)
    assert list(job.runs) == [0, 1] and job.world_size == 2 and not job.problems, job.problems
    jobs = [run.job for run in job.runs.values() if run.job is not None]
    assert [(j.local_rank, j.world_size) for j in jobs] == [(0, 2), (1, 2)]
    assert {rank: len(run.steps) for rank, run in job.runs.items()} == {0: STEPS, 1: STEPS}
    exchanging = {rank.rank: rank.communication_us for rank in report(job).comparison.ranks}
    assert set(exchanging) == {0, 1} and all(time_us > 0 for time_us in exchanging.values()), exchanging


@pytest.mark.parametrize(
    ("training", "words", "more"),
    [
        pytest.param(DDP, BY_GPULAB, "", marks=in_turn(0, *LAUNCHING)),
        pytest.param(HUGGING_FACE, BY_TORCHRUN, "", marks=in_turn(1, *LAUNCHING)),
        pytest.param(LIGHTNING_NET + LIGHTNING, GPULAB, "trained 1 ['--lr', '1']", marks=in_turn(0, *LAUNCHING)),
        pytest.param(
            *(OWN_TORCHRUN + DDP, GPULAB, "the ranks that the script started are recorded"),
            marks=in_turn(1, *LAUNCHING),
        ),
    ],
    ids=["DDP", "HF", "Lightning's own ranks", "a torchrun of its own"],
)
def test_a_script_is_one_job(training: str, words: list[str], more: str, tmp_path: Path, own_store: Path) -> None:
    said = " ".join(record(words, tmp_path, training, "--lr", "1").split())
    assert "trained 0" in said and "trained 1" in said and more in said
    assert said.count("2 of 2 ranks") == said.count("gpulab · ") == 1 and "not measured" not in said
    check_job(Store(own_store / "runs"))


@pytest.mark.slow("two jobs whose processes import torch and Accelerate")
def test_ranks_a_script_forks_and_what_to_write(tmp_path: Path, own_store: Path) -> None:
    call = 'if __name__ == "__main__":\n    {}\n'
    said = record(GPULAB, tmp_path, ACCELERATE + call.format("notebook_launcher(training, (2,), num_processes=2)"))
    said = " ".join(said.split())
    (advice,) = re.findall(r"use (.*) instead, under gpulab record --ranks 2\.", said)
    assert said.count("cannot be followed") == 1 and "did not measure" in said
    said = record(BY_GPULAB, tmp_path, ACCELERATE + call.format(advice))
    assert "2 of 2 ranks" in said
    check_job(Store(own_store / "runs"))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("doors")) as started:
        answer = started.run("%load_ext gpulab\n" + IMPORTS + ACCELERATE + LIGHTNING_NET)
        assert answer.status == "ok", answer.error
        yield started


def run_ranks(session: KernelSession, text: str) -> Answer:
    answer = session.run(f"%%gpuprofile --ranks 2\n{text}")
    assert answer.status == "ok", answer.error
    assert not ranks_of(session)
    return answer


def ranks_of(session: KernelSession) -> list[str]:
    """Processes of any rank of this kernel that are still there."""
    here = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "RANK" in (variables := process.environ()) and variables.get("GPULAB_DIR") == str(
                session.folder / "store"
            ):
                here.append(" ".join(process.cmdline()))
    return here


@pytest.mark.parametrize("text", [FSDP, "training(2)", LIGHTNING], ids=["FSDP2", "Accelerate", "Lightning"])
def test_a_cell_is_one_job(session: KernelSession, text: str) -> None:
    """The notebook has the rest of Accelerate's and Lightning's, and the ranks get it."""
    answer = run_ranks(session, text)
    assert "[rank 0] trained 0" in answer.stdout and "[rank 1] trained 1" in answer.stdout
    assert "2 of 2 ranks" in " ".join(display["text/plain"] for display in answer.displays())
    check_job(Store(session.folder / "store" / "runs"))


def test_ranks_a_cell_forks_and_what_to_write(session: KernelSession) -> None:
    call = "notebook_launcher(training, (2,), num_processes=2)"
    shown, _ = session.run(f"%%gpuprofile\n{call}").report()
    text = " ".join(shown["text/plain"].split())
    (advice,) = re.findall(r"use (.*) instead, under %%gpuprofile --ranks 2\.", text)
    assert text.count("cannot be followed") == 1
    refused = session.run(f"%%gpuprofile --ranks 2\n{call}")
    assert refused.stderr.startswith("UsageError") and f"use {advice} instead" in refused.stderr
    answer = run_ranks(session, advice)
    assert "[rank 1] trained 1" in answer.stdout


def test_lightnings_ranks_with_and_without_forking(session: KernelSession) -> None:
    forking = LIGHTNING.replace("ddp", "ddp_notebook")
    refused = session.run(f"%%gpuprofile --ranks 2\n{forking}")
    assert refused.stderr.startswith("UsageError") and 'use strategy="ddp" instead' in refused.stderr
    by_itself = LIGHTNING.replace('strategy="ddp", ', "")  # in a notebook it forks, in a rank it does not
    answer = run_ranks(session, by_itself)
    assert "[rank 0] trained 0" in answer.stdout and "[rank 1] trained 1" in answer.stdout
    check_job(Store(session.folder / "store" / "runs"))


def test_ranks_that_a_cell_starts_itself_are_followed(session: KernelSession) -> None:
    (session.folder / "train.py").write_text(IMPORTS + DDP)
    before = session.value("dict(__import__('os').environ)")
    start = f"!'{sys.executable}' -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
    answer = session.run(f"%%gpuprofile\n{start}")
    assert answer.status == "ok" and "trained 1" in answer.stdout, answer.error
    shown, _ = answer.report()
    assert "2 of 2 ranks" in " ".join(shown["text/plain"].split())
    check_job(Store(session.folder / "store" / "runs"))
    assert session.value("dict(__import__('os').environ)") == before
