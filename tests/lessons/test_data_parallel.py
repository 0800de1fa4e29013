"""Lesson 11: three exercises, ways to agree, and the slow link between two real ranks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gpulab.lessons.data_parallel import (
    WAYS,
    Way,
    compare_ways,
)
from gpulab.lessons.editions import solutions
from gpulab.lessons.slow_link import SlowLink
from tests.lessons.notebook_kernel import shipped
from tests.support.fork_server import EXECUTABLE, python_with_torch

SOLUTIONS = solutions(shipped("11_data_parallel"))


# -- ways to agree -----------------------------------------------------------------------------------------------------


def columns(line: str) -> tuple[float, float]:
    """What is sent, and the error."""
    return float(line[31:37]), float(re.split(r"weights +", line)[1].split()[0])


def test_fewer_exchanges_send_less_and_learn_less() -> None:
    table = compare_ways()
    rows = {way.name: columns(line) for way, line in zip(WAYS, table.lines[1:], strict=True)}
    together, local, rare, gossip, alone = (rows[name] for name in rows if "late" not in name)
    assert together[0] > gossip[0] > local[0] > rare[0] > alone[0] == 0
    assert together[1] < local[1] < alone[1] and gossip[1] < alone[1]
    assert repr(table) == repr(compare_ways()), "the same figures each time"


def test_one_exchange_every_step_is_all_reduce_of_the_weights() -> None:
    of_gradients, of_weights = (columns(one) for one in compare_ways((WAYS[0], Way("w", "weights"))).lines[1:])
    assert of_gradients == of_weights, "the mean of weights that start alike moves by the mean of the gradients"


# -- the slow link -----------------------------------------------------------------------------------------------------


def test_the_link_takes_what_it_says() -> None:
    link = SlowLink(100, latency_ms=2)
    assert link.seconds(10_000_000, ranks=2) == pytest.approx(0.102)
    assert link.seconds(10_000_000, ranks=4) == pytest.approx(0.152)
    for wrong in ((0, 1), (10, -1)):
        with pytest.raises(ValueError, match="a link carries something"):
            SlowLink(*wrong)


TWO_RANKS = """
import os
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from gpulab.lessons import slow_link
from gpulab.lessons.slow_link import SlowLink
{ring}

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))


def gradients(link):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    if link is not None:
        ddp.register_comm_hook(link, SlowLink.all_reduce)
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


wanted = gradients(None)
slept = []
slow_link.time = SimpleNamespace(sleep=slept.append)
over_link = gradients(SlowLink(1000, latency_ms=50))
wanted_s = 0.05 * len(slept) + 2 * 4 * 8385 / 1e9  # two passes, 8,385 parameters
as_slow_as_said = len(slept) >= 3 and abs(sum(slept) - wanted_s) < 1e-9
halved = gradients(SlowLink(1000, latency_ms=0, sixteen_bits=True))
model = nn.Linear(4, 1)
nn.init.constant_(model.weight, float(rank))
SlowLink(1000).average(model)
tensor = torch.arange(1000.0) * (rank + 1)
my_all_reduce(tensor, dist)
said = (
    "rank", rank,
    torch.allclose(over_link, wanted), as_slow_as_said,
    torch.allclose(halved, wanted, rtol=1e-2, atol=1e-3), not torch.equal(halved, wanted),
    model.weight.mean().item() == 0.5, torch.equal(tensor, torch.arange(1000.0) * 3),
)
os.write(1, (" ".join(map(str, said)) + chr(10)).encode())  # in one piece: the ranks write to the same place
dist.destroy_process_group()
"""


def test_two_real_ranks_over_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook gives DDP's own gradients, and sleeps as it says; exercise 1's solution is an all-reduce here, too."""
    script = tmp_path / "ranks.py"
    script.write_text(TWO_RANKS.format(ring=SOLUTIONS["all-reduce"]), encoding="utf-8")
    monkeypatch.setenv(EXECUTABLE, python_with_torch())
    command = [python_with_torch(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} True True True True True True" for rank in range(2)]
