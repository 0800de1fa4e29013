"""Ranks that are threads: messages pass as between processes, and who waits for ever is seen at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpulab.lessons.lesson import TimeLimit, time_limit
from gpulab.lessons.ranks import Deadlock, ThreadRank, run_ranks


def test_a_message_passes_from_one_rank_to_another() -> None:
    def work(dist: ThreadRank) -> Tensor:
        value = torch.full((3,), float(dist.get_rank()))
        if dist.get_rank() == 0:
            dist.send(value + 7, 1)
        else:
            dist.recv(value, 0)
        return value

    ended = run_ranks(work, 2)
    assert ended.results[1].tolist() == [7, 7, 7]
    assert ended.sent_bytes == [12, 0]


def test_messages_between_two_ranks_keep_their_order() -> None:
    def work(dist: ThreadRank) -> list[float]:
        if dist.get_rank() == 0:
            sent = [dist.isend(torch.tensor([float(n)]), 1) for n in range(5)]
            for one in sent:
                one.wait()
            return []
        arriving = torch.empty(1)
        values = []
        for _ in range(5):
            dist.recv(arriving, 0)
            values.append(arriving.item())
        return values

    assert run_ranks(work, 2).results[1] == [0, 1, 2, 3, 4]


def test_a_receive_that_was_begun_lets_a_send_go_on() -> None:
    """As in PyTorch: an irecv takes the message, whether somebody waits for it or not."""

    def work(dist: ThreadRank) -> float:
        other = 1 - dist.get_rank()
        arriving = torch.empty(1)
        receiving = dist.irecv(arriving, other)
        dist.send(torch.tensor([float(dist.get_rank())]), other)
        receiving.wait()
        return arriving.item()

    assert run_ranks(work, 2).results == [1, 0]


def test_all_reduce_gives_the_sum_or_the_mean_to_all() -> None:
    def work(dist: ThreadRank) -> tuple[float, float]:
        summed, mean = torch.tensor(float(dist.get_rank())), torch.tensor(float(dist.get_rank()))
        dist.all_reduce(summed)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        return summed.item(), mean.item()

    assert run_ranks(work, 4).results == [(6, 1.5)] * 4


def all_send(dist: ThreadRank) -> None:
    dist.send(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size())


def one_reduces_twice(dist: ThreadRank) -> None:
    for _ in range(1 + dist.get_rank()):
        dist.all_reduce(torch.ones(1))


def one_fails(dist: ThreadRank) -> None:
    if dist.get_rank() == 1:
        raise KeyError("mine")
    dist.recv(torch.empty(1), 1)


def sizes_differ(dist: ThreadRank) -> None:
    dist.send(torch.ones(2), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(3), 0)


@pytest.mark.parametrize(
    ("work", "ranks", "error", "words"),
    [
        (all_send, 2, Deadlock, "rank 0 waits in a send to rank 1; rank 1 waits in a send to rank 0"),
        (all_send, 4, Deadlock, "rank 3 waits in a send to rank 0"),
        (one_reduces_twice, 2, Deadlock, "rank 1 waits in all_reduce"),
        (one_fails, 2, KeyError, "mine"),  # and not what it left behind
        (sizes_differ, 2, ValueError, r"rank 0 sends \[2\], rank 1 receives \[3\]"),
        (lambda dist: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX), 2, ValueError, "only ReduceOp"),
        (lambda dist: dist.send(torch.ones(1), 2), 2, ValueError, "has no rank"),
        (lambda dist: dist.send(torch.ones(1), -1), 2, ValueError, "has no rank"),
        (lambda dist: dist.send(torch.ones(1), dist.get_rank()), 2, ValueError, "has no rank"),
    ],
)
def test_what_cannot_go_on_is_noticed(
    work: Callable[[ThreadRank], None], ranks: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run_ranks(work, ranks)


def test_a_time_limit_ends_the_threads() -> None:
    before = set(threading.enumerate())

    def work(_: ThreadRank) -> None:
        while True:
            sum(range(100))

    with pytest.raises(TimeLimit), time_limit(0.2):
        run_ranks(work, 2)
    until = time.monotonic() + 60
    while (left := [one for one in threading.enumerate() if one not in before and one.is_alive()]) and (
        time.monotonic() < until
    ):
        time.sleep(0.01)
    assert not left
