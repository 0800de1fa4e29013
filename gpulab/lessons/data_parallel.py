"""Lesson 11, data parallel: buckets, compression, local steps, uneven shards, and an all-reduce written by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from gpulab.formatting import percent, plural
from gpulab.lessons.check import Checked, Table, exercise, right, wrong
from gpulab.lessons.guesses import Question, share, times, times_between
from gpulab.lessons.measured import waiting_share
from gpulab.lessons.ranks import Deadlock, Ended, ThreadRank, run_ranks
from gpulab.lessons.training import seeded, weights_of
from gpulab.views.waiting import waiting

RANK_COUNTS = (2, 3, 4)
EVERY, STEPS, LEARNING_RATE = 3, 7, 0.1
AS_EVEN = 0.05  # tolerated deviation of a rank's work from the mean, as a fraction
TEXTS = 96

# -- ways to agree, as a simulation ------------------------------------------------------------------------------------

SIMULATED_RANKS, SIMULATED_STEPS, SIMULATED_RATE = 8, 399, 0.01
WIDTH, SAMPLES = 32, 16


class Way(Struct, frozen=True):
    """How ranks synchronize their models: they average what `shares` says, every so many steps, `delay` steps late."""

    name: str
    shares: str = "gradients"  # or "weights", "a neighbour's weights", "nothing"
    every: int = 1
    delay: int = 0


WAYS = (
    Way("all-reduce of the gradients"),
    Way("the same, 4 steps late", delay=4),
    Way("local SGD, every 8 steps", "weights", every=8),
    Way("local SGD, every 50 steps", "weights", every=50),
    Way("gossip with one neighbour", "a neighbour's weights"),
    Way("never", "nothing"),
)


def compare_ways(ways: Sequence[Way] = WAYS) -> Table:
    """Eight simulated ranks learn the same function, each from its own samples: what is sent, and what is learned.

    Uses no clock and fixed random numbers, so that a machine always gives the same figures. "error" is the squared
    distance of a rank's weights from the function's own, "apart" their distance from the ranks' mean as a share of its
    length, both of the rank in the middle.
    """
    rows = []
    with waiting("training eight simulated ranks, each way"):
        for way in ways:
            with seeded():
                sent, loss, apart = _simulated(way)
            rows.append((way.name, f"{sent:.1f} × weights", f"{loss:.4f}", percent(apart)))
    return Table.of(("way", "sent by each rank", "error", "apart"), rows)


def _simulated(way: Way) -> tuple[float, float, float]:
    """Sent in multiples of the weights, the error of the weights, and how far the ranks are apart."""
    teacher = torch.randn(WIDTH, 1) / WIDTH**0.5
    weights = torch.zeros(SIMULATED_RANKS, WIDTH, 1, requires_grad=True)
    late: deque[Tensor] = deque()
    sent = 0.0
    for step in range(1, SIMULATED_STEPS + 1):
        inputs = torch.randn(SIMULATED_RANKS, SAMPLES, WIDTH)
        targets = inputs @ teacher + 0.5 * torch.randn(SIMULATED_RANKS, SAMPLES, 1)
        loss = ((inputs @ weights - targets) ** 2).mean(dim=(1, 2)).sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        exchanges = way.shares != "nothing" and step % way.every == 0
        if exchanges:
            sent += 1.0 if way.shares == "a neighbour's weights" else 2 * (SIMULATED_RANKS - 1) / SIMULATED_RANKS
        with torch.no_grad():
            if way.shares == "gradients":
                late.append(gradient.mean(0, keepdim=True).expand_as(gradient))
                gradient = late.popleft() if len(late) > way.delay else torch.zeros_like(gradient)
            weights -= SIMULATED_RATE * gradient
            if way.shares == "weights" and exchanges:
                weights.copy_(weights.mean(0, keepdim=True).expand_as(weights))
            elif way.shares == "a neighbour's weights" and exchanges:
                weights.copy_((weights + weights[_partners(step)]) / 2)
    with torch.no_grad():
        mean = weights.mean(0, keepdim=True)
        apart = float(((weights - mean).norm(dim=1) / mean.norm()).median())
        errors = ((weights - teacher) ** 2).sum(dim=(1, 2))
    return sent, float(errors.median()), apart


def _partners(step: int) -> list[int]:
    """The partner of each rank: 0-1, 2-3, … in odd steps; 1-2, 3-4, …, 7-0 in even steps."""
    n, shift = SIMULATED_RANKS, 1 - step % 2
    return [(((rank - shift) % n ^ 1) + shift) % n for rank in range(n)]


# -- exercise 1: an all-reduce by hand ---------------------------------------------------------------------------------


@exercise()
def check_all_reduce(my_all_reduce: Any) -> Checked:
    """Whether `my_all_reduce(tensor, dist)` leaves the sum in every rank's tensor, and no rank sends more than a ring.

    Runs with two, three and four threads of this process as ranks.
    """
    most = 0.0
    for ranks in RANK_COUNTS:
        tensors = [torch.arange(12.0, dtype=torch.float64) * 10**rank for rank in range(ranks)]
        before = [tensor.clone() for tensor in tensors]
        try:
            ended = run_ranks(lambda dist: my_all_reduce(tensors[dist.get_rank()], dist), ranks)  # noqa: B023
        except Deadlock as e:
            return wrong(
                f"With {ranks} ranks all of them wait, for ever: {e}. A send waits until the other rank receives: "
                "begin with isend, receive, and wait for the isend then."
            )
        if hint := _wrong_sum(before, tensors, ended):
            return wrong(f"With {ranks} ranks: {hint}")
        multiples = [sent / tensors[0].nbytes for sent in ended.sent_bytes]
        allowed = 2 * (ranks - 1) / ranks
        most = max(multiples)
        if most > allowed + 1e-9:
            rank = multiples.index(most)
            return wrong(
                f"The sums are right. With {ranks} ranks, rank {rank} sends {most:.2f} times its tensor; "
                f"2(n-1)/n = {allowed:.2f} times is enough. Send one part in each round, and to the next rank only."
            )
    return right(
        f"With {RANK_COUNTS[-1]} ranks each sends {most:.2f} times its tensor; however many there are, it is less than "
        "twice."
    )


def _wrong_sum(before: Sequence[Tensor], after: Sequence[Tensor], ended: Ended) -> str:
    reference = torch.stack(list(before)).sum(0)
    returned = any(isinstance(result, Tensor) and torch.equal(result, reference) for result in ended.results)
    if returned and not torch.equal(after[-1], reference):
        return "it returns the sum, and the tensor that was given must hold it: write into it, as dist.all_reduce does."
    right_ones = [rank for rank, tensor in enumerate(after) if torch.equal(tensor, reference)]
    if len(right_ones) == len(after):
        return ""
    if all(torch.allclose(tensor, reference / len(after)) for tensor in after):
        return "that is the mean; expected the sum."
    if right_ones:
        return f"the sum is right on rank {', '.join(map(str, right_ones))} alone; all ranks need it."
    places = (after[0] == reference).nonzero().flatten().tolist()
    if places:
        return (
            f"on rank 0 the sum is right at {plural(len(places), 'place')} of {len(reference)}. After the first n-1 "
            "rounds each rank has one part that is summed up; n-1 further rounds hand these on, copied and not added."
        )
    return f"rank 0 has {after[0][1]:g} at place 1, and {reference[1]:g} is the sum. Which part is sent in which round?"


# -- exercise 2: local SGD ---------------------------------------------------------------------------------------------


@exercise()
def check_local_sgd(my_local_sgd: Any) -> Checked:
    """Whether `my_local_sgd(model, optimizer, batches, every, dist)` trains alone and averages the weights at times."""
    for ranks in RANK_COUNTS[:2]:
        try:
            mine, exchanges = _trained(my_local_sgd, ranks)
        except Deadlock as e:
            return wrong(f"With {ranks} ranks they wait for one another, for ever: {e}. Do all exchange equally often?")
        if hint := _wrong_training(mine, exchanges, ranks):
            return wrong(hint)
    return right(
        f"{STEPS} steps with {plural(STEPS // EVERY, 'exchange')}; in between each rank trained alone, and after each "
        "exchange all had the same weights."
    )


LocalSgd = Callable[[nn.Module, torch.optim.Optimizer, Sequence[tuple[Tensor, Tensor]], int, ThreadRank], object]


def _trained(local_sgd: LocalSgd, ranks: int) -> tuple[list[Tensor], int]:
    """The weights of each rank, and after how many steps rank 0 exchanged anything."""
    random = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(ranks, STEPS, 8, n, generator=random).double() for n in (4, 1))
    models = [_model() for _ in range(ranks)]
    exchanged_at: set[int] = set()

    def work(dist: ThreadRank) -> None:
        rank = dist.get_rank()
        optimizer = torch.optim.SGD(models[rank].parameters(), lr=LEARNING_RATE)
        steps: list[None] = []
        optimizer.register_step_post_hook(lambda *_: steps.append(None))
        if rank == 0:
            dist.when_exchanging = lambda: exchanged_at.add(len(steps))
        local_sgd(models[rank], optimizer, list(zip(inputs[rank], targets[rank], strict=True)), EVERY, dist)

    run_ranks(work, ranks)
    return [weights_of(model) for model in models], len(exchanged_at)


def _model() -> nn.Module:
    with seeded():
        return nn.Linear(4, 1).double()


def _reference(*, divide: bool = True, gradients: bool = False) -> LocalSgd:
    """Local SGD, or its wrong variants: a sum in place of the mean, or gradients in place of weights."""

    def local_sgd(model: nn.Module, optimizer: Any, batches: Sequence[Any], every: int, dist: ThreadRank) -> None:
        def exchange(tensors: Iterable[Tensor | None]) -> None:
            for tensor in tensors:
                if tensor is not None:
                    dist.all_reduce(tensor)
                    tensor /= dist.get_world_size() if divide else 1

        for number, (inputs, targets) in enumerate(batches, start=1):
            optimizer.zero_grad()
            torch.autograd.backward(functional.mse_loss(model(inputs), targets))
            if gradients and number % every == 0:
                exchange(weight.grad for weight in model.parameters())
            optimizer.step()
            if not gradients and number % every == 0:
                exchange(weight.detach() for weight in model.parameters())

    return local_sgd


def _wrong_training(mine: Sequence[Tensor], exchanges: int, ranks: int) -> str:
    def equals(**options: bool) -> bool:
        reference, _ = _trained(_reference(**options), ranks)
        return all(torch.allclose(a, b) for a, b in zip(mine, reference, strict=True))

    often = exchanges > STEPS // EVERY
    if equals():
        expected = f"expected {STEPS // EVERY}"
        return f"The weights are right, but the ranks exchange after {exchanges} steps; {expected}." if often else ""
    if not exchanges:
        return "The ranks never exchange anything, so each learns a model of its own: call dist.all_reduce."
    if equals(divide=False):
        return "all_reduce gives the sum of the ranks' weights; divide it by dist.get_world_size()."
    if equals(gradients=True):
        return (
            "It averages gradients, and what the ranks did in between stays different: average the weights, after the "
            "step."
        )
    if often:
        return (
            f"The ranks exchange after {exchanges} of {STEPS} steps; expected every {EVERY} steps: count the "
            "steps from 1, and exchange when number % every is 0."
        )
    return (
        "The weights are not those of local SGD: zero_grad, backward and step for each batch, then the mean of weights."
    )


# -- exercise 3: even shards -------------------------------------------------------------------------------------------


@exercise()
def check_shard(my_shard: Any) -> Checked:
    """Whether `my_shard(lengths, rank, ranks)` gives each rank different texts, equally many and equally long."""
    for ranks in RANK_COUNTS:
        for lengths in (text_lengths(TEXTS), _shuffled(text_lengths(TEXTS))):
            shards = [my_shard(list(lengths), rank, ranks) for rank in range(ranks)]
            if hint := _wrong_shards(shards, lengths):
                return wrong(f"With {ranks} ranks: {hint}")
    return right(f"No rank has more than {percent(AS_EVEN)} more or less to read than the mean, with 2, 3 and 4 ranks.")


def _wrong_shards(shards: Sequence[Any], lengths: Sequence[int]) -> str:
    try:
        positions = [[int(at) for at in shard] for shard in shards]
    except (TypeError, ValueError):
        return "it must give a list of positions in `lengths`, such as [0, 5, 6]."
    counts = Counter(at for shard in positions for at in shard)
    strange = [at for at in counts if not 0 <= at < len(lengths)]
    if strange:
        return f"there is no text at position {strange[0]}: are these lengths? Expected their positions."
    twice = [at for at, count in counts.items() if count > 1]
    if twice:
        return f"the text at position {twice[0]} is given to several ranks, or twice to one."
    if len(counts) < len(lengths):
        return f"{len(lengths) - len(counts)} of {len(lengths)} texts are given to no rank."
    sizes = [len(shard) for shard in positions]
    if len(set(sizes)) > 1:
        return (
            f"the ranks get {', '.join(map(str, sizes))} texts; all need as many, or they wait for one another's steps."
        )
    work = [sum(lengths[at] for at in shard) for shard in positions]
    mean = sum(work) / len(work)
    worst = max(range(len(work)), key=lambda rank: abs(work[rank] - mean))
    off = work[worst] / mean - 1
    if abs(off) > AS_EVEN:
        return (
            f"rank {worst} has {percent(abs(off))} {'more' if off > 0 else 'less'} to read than the mean. Sort the "
            "positions by length and deal them out like cards; and who was first in one round is last in the next."
        )
    return ""


def text_lengths(count: int) -> list[int]:
    """Lengths of `count` texts in letters, ascending; a few are far longer than most, as in real data."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.exp(5.5 + 0.5 * torch.randn(count, generator=random))
    return sorted(int(length) for length in lengths)


def _shuffled(lengths: Sequence[int]) -> list[int]:
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(2))
    return [lengths[at] for at in order.tolist()]


# -- what the notebook asks --------------------------------------------------------------------------------------------

QUESTIONS: Mapping[str, Question] = {
    "buckets": times(
        "What speedup do buckets of 2 MB give over one bucket for all gradients?",
        "buckets",
        "with buckets of 2 MB",
        setting=("bucket_cap_mb", "2"),
    ),
    "tiny": times(
        "And a bucket for each layer, over one bucket for all? (0.5: 2× slower)",
        "buckets",
        "with a bucket for each layer",
        setting=("bucket_cap_mb", "0.01"),
    ),
    "half": times_between(
        "What speedup do 16-bit gradients give over the slow link?",
        "slow-link",
        "half-the-bytes",
        "over the slow link with gradients of 16 bits",
    ),
    "local": times_between(
        "What speedup does an exchange only every 8 steps give over the slow link?",
        "slow-link",
        "local-steps",
        "over the slow link with an exchange every 8 steps",
    ),
    "straggler": share(
        "What share of its step does rank 0 wait for rank 1?",
        lambda: waiting_share("uneven", rank=0),
        "of each step rank 0 waits for rank 1",
    ),
}
