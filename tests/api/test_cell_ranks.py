"""`%%gpuprofile --ranks 2` in a real kernel: fresh processes, told apart, one report, and nothing of them is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.kernel_session import KernelSession, kernel

SETUP = """
import time
import torch
import torch.distributed as dist
from torch import nn

%load_ext gpulab
import gpulab

STEPS, late_s = 40, 0.1  # a busy machine adds less

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))
    def forward(self):
        return self.weight.sum()

def train(steps):
    dist.init_process_group("gloo")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        if dist.get_rank() == 1:
            time.sleep(late_s)
        net().backward()
        dist.all_reduce(net.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            print("half way", dist.get_rank(), flush=True)
    dist.destroy_process_group()

loader = torch.utils.data.DataLoader([1, 2, 3])
"""


REAL_LAUNCHER = f"""
import sys
of_forks, sys.executable = sys.executable, {sys.executable!r}  # ranks that hang end as its children
"""
FAILING = """%%gpuprofile --ranks 2
import os
if os.environ["RANK"] == "1":
    raise KeyError("sample 13")
train(STEPS)"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("ranks")) as started:
        answer = started.run(SETUP)
        assert answer.status == "ok", answer.error
        yield started


def of_ranks(folder: Path | None = None) -> list[str]:
    """Processes of any rank that a notebook, or the one in that folder, has started and that are still there."""
    here = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        with suppress(psutil.Error):
            if "gpulab-ranks-" in line and process.environ().get("GPULAB_DIR", "").startswith(str(folder or "")):
                here.append(line)
    return here


def test_a_straggler_is_named_in_one_report(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --ranks 2 -r\ntrain(STEPS)\nprint('done', dist.is_initialized())")
    assert answer.status == "ok", answer.error
    assert "[rank 0] half way 0" in answer.stdout and "[rank 1] half way 1" in answer.stdout
    assert "[rank 0] done False" in answer.stdout
    said = " ".join(display["text/plain"] for display in answer.displays())
    assert "2 of 2 ranks" in said and "rank 1" in said
    assert session.value("[gpulab.runs[-1].job.rank, gpulab.runs[-1].source]") == [0, "cell"]
    assert not any(session.left_behind().values())
    assert not of_ranks(session.folder)


def test_what_lives_in_the_notebook_is_refused(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --ranks 2\nfor batch in loader: print(batch)")
    said = answer.stderr
    assert said.startswith("UsageError") and "loader (a DataLoader)" in said and "\nThe cell did not run." in said
    assert "\n    loader = torch.utils.data.DataLoader([1, 2, 3])" in said
    for line in ("--ranks 2 --no-save", "--ranks 0"):
        answer = session.run(f"%%gpuprofile {line}\nprint('ran')")
        assert answer.stderr.startswith("UsageError") and "--ranks" in answer.stderr and "ran" not in answer.stdout


@pytest.mark.slow("a job whose ranks import torch, the first of its kernel")
def test_a_rank_that_fails_is_shown_with_its_line(session: KernelSession) -> None:
    answer = session.run(FAILING)
    assert "[rank 1] KeyError: 'sample 13'" in answer.stderr and "cell.py" in answer.stderr
    assert answer.status == "error" and answer.error is not None, "so that Run All stops there"
    assert answer.error[0] == "RankError" and "Rank 1: KeyError: 'sample 13'." in answer.error[1]
    assert "gpulab/api" not in answer.error[2]
    assert not of_ranks(session.folder)


def test_the_report_again_is_of_the_whole_job(session: KernelSession) -> None:
    assert session.run("%%gpuprofile again --ranks 2\ntrain(STEPS)").status == "ok"
    job = session.value("gpulab.runs[-1].job.id")
    for word in ("", "latest", "again", job, job[:-3], "again --all   # with all sections"):
        shown, _ = session.run(f"%gpulab report {word}").report()
        assert f"gpulab · again · {job} · 2 of 2 ranks" in shown["text/plain"], word
    one = session.value("gpulab.runs[-1].id")
    shown, _ = session.run(f"%gpulab report {one}").report()
    assert "2 of 2 ranks" not in shown["text/plain"], "a rank that is meant"


def test_stop_ends_all_ranks_and_keeps_their_runs(session: KernelSession) -> None:
    running = session.begin("%%gpuprofile --ranks 2\ntrain(1_000_000)")
    session.wait(running, lambda a: "half way 1" in a.stdout and "half way 0" in a.stdout)
    session.interrupt()
    answer = session.finish(running)
    assert answer.error is not None and answer.error[0] == "Interrupted"
    assert session.value("gpulab.runs[-1].outcome") in ("interrupted", "failed")
    assert not of_ranks(session.folder)


HANGING = """%%gpuprofile --ranks 2
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # nothing that asks ends them
dist.init_process_group("gloo")
print("here", flush=True)
if dist.get_rank() == 0:
    dist.all_reduce(torch.zeros(1))  # rank 1 never comes
time.sleep(10_000)"""


def test_a_second_stop_ends_ranks_that_hang(session: KernelSession) -> None:
    session.run(REAL_LAUNCHER)
    running = session.begin(HANGING)
    session.wait(running, lambda a: a.stdout.count("here") == 2)
    session.interrupt()
    time.sleep(1.0)
    session.interrupt()
    answer = session.finish(running)
    assert answer.error is not None and answer.error[0] in ("Interrupted", "KeyboardInterrupt")
    assert not of_ranks(session.folder)


def test_a_notebook_in_a_cluster_job_knows_its_own_ranks(session: KernelSession) -> None:
    session._silent("import os; os.environ |= {'SLURM_JOB_ID': '77', 'SLURM_PROCID': '0', 'SLURM_NTASKS': '1'}")
    try:
        answer = session.run("%%gpuprofile --ranks 2 --warmup 0\ntrain(STEPS)")
    finally:
        session._silent("for name in ('SLURM_JOB_ID', 'SLURM_PROCID', 'SLURM_NTASKS'): del os.environ[name]")
    assert answer.status == "ok" and "2 of 2 ranks" in " ".join(d["text/plain"] for d in answer.displays())
    assert session.value("gpulab.runs[-1].settings.warmup") == 0
