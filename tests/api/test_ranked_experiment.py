"""`--ab`, `--sweep` and `--set` together with `--ranks 2`, in a real kernel: one decision for all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.test_cell_ranks import SETUP, of_ranks
from tests.support.kernel_session import KernelSession, kernel

DDP = """
from torch.nn.parallel import DistributedDataParallel

def train_ddp(steps, fails=False, late_s=0.0):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if fails and step == 5 and dist.get_rank() == 1:
            raise KeyError("sample 13")
        if dist.get_rank() == 1:
            time.sleep(late_s)
        loss = model(torch.randn(8, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelSession]:
    with kernel(tmp_path_factory.mktemp("ranks")) as started:
        for code in (SETUP, DDP):
            answer = started.run(code)
            assert answer.status == "ok", answer.error
        yield started
        assert not of_ranks(started.folder)


def compared(session: KernelSession, code: str) -> str:
    answer = session.run(code)
    assert answer.status == "ok", answer.error
    return "\n".join(str(display["text/plain"]) for display in answer.displays())


@pytest.mark.slow("two ranks import torch and run a comparison in blocks")
def test_a_straggler_taken_away_is_faster(session: KernelSession) -> None:
    said = compared(session, "%%gpuprofile --ab late_s=0.0 --ranks 2 --pairs 4\ntrain_ddp(40, False, late_s)")
    assert "Faster: late_s=0.0" in said and "4 pairs of blocks" in said
    verdict = session.value("[gpulab.experiments[-1].verdict, len(gpulab.experiments[-1].only.a.blocks)]")
    assert verdict == ["faster", 8]
    ranks = session.value("[run.job.world_size for run in gpulab.runs[-2:]]")
    assert ranks == [2, 2], "both full runs are among gpulab.runs"


def test_bucket_sizes_swept_give_the_same_loss(session: KernelSession) -> None:
    compared(session, "%%gpuprofile --sweep bucket_cap_mb=0.05,100 --ranks 2 --pairs 3\ntrain_ddp(40)")
    shown = session.value("[[c.pairs, c.loss.verdict, c.b.failure] for c in gpulab.experiments[-1].comparisons]")
    assert shown == [[3, "same", ""], [3, "same", ""]]
    checks = session.value("[c.b.checks[0].evidence for c in gpulab.experiments[-1].comparisons]")
    assert checks == [f"1 DistributedDataParallel was created with bucket_cap_mb={mb}" for mb in (0.05, 100)]


def test_what_gloo_cannot_do_is_said(session: KernelSession) -> None:
    said = compared(session, "%%gpuprofile --ab comm_hook=bf16 --ranks 2 --pairs 3\ntrain_ddp(40)")
    assert "PyTorch rejected the hook" in " ".join(said.split())


def test_without_ddp_there_is_nothing_to_turn(session: KernelSession) -> None:
    said = compared(session, "%%gpuprofile --ab bucket_cap_mb=1 --ranks 2\ntrain(STEPS)")
    assert "no DistributedDataParallel is called in your code" in " ".join(said.split())


def test_the_failure_of_one_rank_is_everybodys(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --ab fails=True --ranks 2 --pairs 3\nfails = False\ntrain_ddp(40, fails)")
    said = " ".join("\n".join(str(display["text/plain"]) for display in answer.displays()).split())
    assert "rank 1 failed: KeyError: 'sample 13'" in said
    assert not of_ranks(session.folder)


def test_a_cell_that_fails_as_written_is_an_error(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --ab fails=False --ranks 2 --pairs 3\nfails = True\ntrain_ddp(40, fails)")
    assert "KeyError" in answer.stderr and "sample 13" in answer.stderr
    assert not of_ranks(session.folder)


@pytest.mark.slow("two ranks import torch and run blocks until they are stopped")
def test_stop_shows_what_was_measured(session: KernelSession) -> None:
    running = session.begin("%%gpuprofile --ab late_s=0.05 --ranks 2 --pairs 30\ntrain_ddp(40, False, late_s)")
    session.wait(running, lambda a: "block 12" in str(a.outputs))
    session.interrupt()
    answer = session.finish(running)
    assert answer.error is not None and answer.error[0] == "Interrupted"
    assert session.value("gpulab.experiments[-1].only.ended_early").startswith("Stopped after")
    assert not of_ranks(session.folder)


def test_set_changes_every_rank(session: KernelSession) -> None:
    answer = session.run("%%gpuprofile --set bucket_cap_mb=3 --ranks 2\ntrain_ddp(40)")
    assert answer.status == "ok", answer.error
    changes = session.value("[[c.name, c.value, c.state] for c in gpulab.runs[-1].changes]")
    assert changes == [["bucket_cap_mb", "3", "took effect"]]
