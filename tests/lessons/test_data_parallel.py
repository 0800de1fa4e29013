"""Lesson 11: three exercises, ways to agree, and the slow link between two real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from gpulab.lessons.check import Checked
from gpulab.lessons.data_parallel import (
    WAYS,
    Way,
    check_all_reduce,
    check_local_sgd,
    check_shard,
    compare_ways,
    text_lengths,
)
from gpulab.lessons.editions import solutions
from gpulab.lessons.slow_link import SlowLink
from tests.lessons.notebook_kernel import shipped

SOLUTIONS = solutions(shipped("11_data_parallel"))


def solution(exercise: str, name: str) -> Any:
    scope: dict[str, Any] = {"torch": torch, "functional": functional}
    exec(SOLUTIONS[exercise], scope)
    return scope[name]


def dots(*_: Any) -> None: ...


# -- a ring ------------------------------------------------------------------------------------------------------------


def send_first(tensor: Any, dist: Any) -> None:
    dist.send(tensor, (dist.get_rank() + 1) % dist.get_world_size())


def by_rank_0(tensor: Any, dist: Any, *, back: bool = True) -> None:
    ranks = dist.get_world_size()
    if dist.get_rank():
        dist.send(tensor, 0)
        if back:
            dist.recv(tensor, 0)
        return
    arriving = torch.empty_like(tensor)
    for rank in range(1, ranks):
        dist.recv(arriving, rank)
        tensor += arriving
    for rank in range(1, ranks):
        if back:
            dist.send(tensor, rank)


def to_rank_0_alone(tensor: Any, dist: Any) -> None:
    by_rank_0(tensor, dist, back=False)


def whole_tensors(tensor: Any, dist: Any) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, going, arriving = tensor.clone(), tensor.clone(), torch.empty_like(tensor)
    for _ in range(ranks - 1):
        sending = dist.isend(going, (rank + 1) % ranks)
        dist.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        going = arriving.clone()
        total += arriving
    tensor.copy_(total)


def returned(tensor: Any, dist: Any) -> Any:
    copy = tensor.clone()
    whole_tensors(copy, dist)
    return copy


def mean(tensor: Any, dist: Any) -> None:
    whole_tensors(tensor, dist)
    tensor /= dist.get_world_size()


def added_up_to_the_end(tensor: Any, dist: Any) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts, arriving = tensor.chunk(ranks), torch.empty_like(tensor.chunk(ranks)[0])
    for turn in range(2 * (ranks - 1)):
        sending = dist.isend(parts[(rank - turn) % ranks], (rank + 1) % ranks)
        dist.recv(arriving, (rank - 1) % ranks)
        sending.wait()
        parts[(rank - turn - 1) % ranks].add_(arriving)


def all_to_all(tensor: Any, dist: Any) -> None:
    """Each part is summed up by one rank, which gives it to all: as few bytes as a ring."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = tensor.chunk(ranks)
    others = [other for other in range(ranks) if other != rank]
    arriving = {other: torch.empty_like(parts[0]) for other in others}
    calls = [dist.irecv(arriving[other], other) for other in others] + [dist.isend(parts[o], o) for o in others]
    for call in calls:
        call.wait()
    parts[rank].add_(sum(arriving.values()))
    calls = [dist.irecv(parts[other], other) for other in others] + [dist.isend(parts[rank], o) for o in others]
    for call in calls:
        call.wait()


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (dots, "unanswered", "in place of the dots"),
        (send_first, "wrong", "begin with isend"),
        (by_rank_0, "wrong", "rank 0 sends 2.00 times its tensor"),
        (to_rank_0_alone, "wrong", "the sum is right on rank 0 alone"),
        (whole_tensors, "wrong", "2(n-1)/n = 1.33 times is enough"),
        (returned, "wrong", "it returns the sum"),
        (mean, "wrong", "that is the mean"),
        (added_up_to_the_end, "wrong", "copied and not added"),
        (all_to_all, "right", "sends 1.50 times its tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_all_reduce_gets_a_hint(answer: Any, state: str, hint: str) -> None:
    checked = check_all_reduce(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


# -- local SGD ---------------------------------------------------------------------------------------------------------


def step(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def average(model: Any, dist: Any, divide: bool = True) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            dist.all_reduce(weight)
            weight /= dist.get_world_size() if divide else 1


def alone(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    for batch in batches:
        step(model, optimizer, batch)


def in_every_step(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    for batch in batches:
        step(model, optimizer, batch)
        average(model, dist)


def one_too_early(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    for number, batch in enumerate(batches):
        step(model, optimizer, batch)
        if number % every == 0:
            average(model, dist)


def undivided(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    for number, batch in enumerate(batches, start=1):
        step(model, optimizer, batch)
        if number % every == 0:
            average(model, dist, divide=False)


def of_gradients(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    for number, (inputs, targets) in enumerate(batches, start=1):
        optimizer.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()
        if number % every == 0:
            for weight in model.parameters():
                dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()


def rank_0_once_more(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    alone(model, optimizer, batches, every, dist)
    if dist.get_rank() == 0:
        average(model, dist)


def in_one_vector(model: Any, optimizer: Any, batches: Any, every: int, dist: Any) -> None:
    for number, batch in enumerate(batches, start=1):
        step(model, optimizer, batch)
        if number % every == 0:
            weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
            dist.all_reduce(weights)
            torch.nn.utils.vector_to_parameters(weights / dist.get_world_size(), model.parameters())


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (dots, "unanswered", "in place of the dots"),
        (alone, "wrong", "never exchange anything"),
        (in_every_step, "wrong", "exchange after 7 of 7 steps"),
        (one_too_early, "wrong", "count the steps from 1"),
        (undivided, "wrong", "divide it by dist.get_world_size()"),
        (of_gradients, "wrong", "It averages gradients"),
        (rank_0_once_more, "wrong", "Do all exchange equally often?"),
        (in_one_vector, "right", "7 steps with 2 exchanges"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_local_sgd_gets_a_hint(answer: Any, state: str, hint: str) -> None:
    checked = check_local_sgd(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


# -- shards ------------------------------------------------------------------------------------------------------------


def halves(lengths: list[int], rank: int, ranks: int) -> list[int]:
    return list(range(rank * len(lengths) // ranks, (rank + 1) * len(lengths) // ranks))


def as_many_letters_but_not_texts(lengths: list[int], rank: int, ranks: int) -> list[int]:
    return list(range(len(lengths)))[: 10 + rank] if rank < ranks - 1 else list(range(len(lengths)))[10 + rank :]


@pytest.mark.parametrize(
    ("answer", "state", "hint"),
    [
        (..., "unanswered", "in place of the dots"),
        (dots, "unanswered", "in place of the dots"),
        (halves, "wrong", "rank 0 has 35 % less to read than the mean"),
        (lambda lengths, rank, ranks: list(range(len(lengths))), "wrong", "is given to several ranks"),
        (lambda lengths, rank, ranks: [rank], "wrong", "94 of 96 texts are given to no rank"),
        (lambda lengths, rank, ranks: lengths[rank::ranks], "wrong", "are these lengths?"),
        (lambda lengths, rank, ranks: "all", "wrong", "a list of positions"),
        (lambda lengths, rank, ranks: 3, "wrong", "a list of positions"),
        (
            lambda lengths, rank, ranks: [at for at in range(len(lengths)) if (at > 9) == (rank > 0)][rank > 1 :],
            "wrong",
            "the ranks get 10, 86 texts",
        ),
    ],
)
def test_a_shard_gets_a_hint(answer: Any, state: str, hint: str) -> None:
    checked = check_shard(answer)
    assert (checked.state, hint in checked.hint) == (state, True), checked


def test_the_long_texts_are_in_one_half() -> None:
    lengths = text_lengths(32)
    assert lengths == sorted(lengths) == text_lengths(32)
    assert sum(lengths[16:]) > 1.5 * sum(lengths[:16])


CHECKS: dict[str, tuple[str, Callable[[Any], Checked]]] = {
    "all-reduce": ("my_all_reduce", check_all_reduce),
    "local-sgd": ("my_local_sgd", check_local_sgd),
    "shard": ("my_shard", check_shard),
}


@pytest.mark.parametrize("exercise", CHECKS)
def test_the_solutions_of_the_notebook_are_right(exercise: str) -> None:
    name, check = CHECKS[exercise]
    assert check(solution(exercise, name)).state == "right"


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


def test_two_real_ranks_over_the_link(tmp_path: Path) -> None:
    """The hook gives DDP's own gradients, and sleeps as it says; exercise 1's solution is an all-reduce here, too."""
    script = tmp_path / "ranks.py"
    script.write_text(TWO_RANKS.format(ring=SOLUTIONS["all-reduce"]), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} True True True True True True" for rank in range(2)]
