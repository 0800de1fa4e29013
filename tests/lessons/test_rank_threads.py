"""Ranks that are threads: messages pass as between processes, and who waits for ever is seen at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

from gpulab.lessons.rank_threads import Deadlock, ThreadRank, run_ranks
from gpulab.lessons.time_limit import TimeLimit, time_limit


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
    with pytest.raises(ValueError, match="only ReduceOp"):
        run_ranks(lambda dist: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX), 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_all_wait_are_noticed(ranks: int) -> None:
    with pytest.raises(Deadlock, match="rank 0 waits in a send to rank 1; rank 1 waits in a send to rank"):
        run_ranks(lambda dist: dist.send(torch.ones(1), (dist.get_rank() + 1) % ranks), ranks)


def test_a_rank_that_is_left_alone_is_noticed() -> None:
    def work(dist: ThreadRank) -> None:
        for _ in range(1 + dist.get_rank()):
            dist.all_reduce(torch.ones(1))

    with pytest.raises(Deadlock, match="rank 1 waits in all_reduce"):
        run_ranks(work, 2)


def test_what_a_rank_raises_comes_before_what_it_left_behind() -> None:
    def work(dist: ThreadRank) -> None:
        if dist.get_rank() == 1:
            raise KeyError("mine")
        dist.recv(torch.empty(1), 1)

    with pytest.raises(KeyError, match="mine"):
        run_ranks(work, 2)


def test_a_message_of_another_size_is_refused() -> None:
    def work(dist: ThreadRank) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        else:
            dist.recv(torch.ones(3), 0)

    with pytest.raises(ValueError, match=r"rank 0 sends \[2\], rank 1 receives \[3\]"):
        run_ranks(work, 2)


@pytest.mark.parametrize("other", [2, -1, 0])
def test_a_rank_that_is_not_there_gets_nothing(other: int) -> None:
    with pytest.raises(ValueError, match="has no rank"):
        run_ranks(lambda dist: dist.send(torch.ones(1), other if dist.get_rank() == 0 else 5), 2)


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
