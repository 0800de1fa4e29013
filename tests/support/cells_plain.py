"""Training cells as users write them: plain PyTorch, nothing of gpulab in them. Each keeps what it trained.

A cell is a function of one list; it appends its modules and tensors as soon as it has made them, so that a test can
look at the weights also when the cell does not come to its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Kept = list[Any]


def data(samples: int) -> TensorDataset:
    """Points and labels, the same at each call."""
    make = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(samples, 8, generator=make), torch.randint(0, 3, (samples,), generator=make))


def model(keep: Kept) -> nn.Module:
    """A small network with dropout, so that a disturbed random stream shows in the weights."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    keep.append(net)
    return net


class Noisy(Dataset[Any]):
    """Augments: draws from torch's random numbers in whatever process it runs."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((8,), float(i)) + torch.randn(8), i % 3


class Stream(IterableDataset[Any]):
    """Knows no length."""

    def __iter__(self) -> Iterator[Any]:
        for i in range(70):
            yield torch.full((8,), i / 70), i % 3


def train(net: nn.Module, batches: Iterable[Any], optimizer: torch.optim.Optimizer | None = None) -> None:
    """An epoch, as a function of the user's."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()


# -- a DataLoader and an optimizer ---------------------------------------------------------------------------------


def one_epoch(keep: Kept) -> None:
    loader = DataLoader(data(96), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()


def three_epochs(keep: Kept) -> None:
    loader = DataLoader(data(30), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _epoch in range(3):
        for x, y in loader:
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def left_early(keep: Kept) -> None:
    loader = DataLoader(data(400), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, batch in enumerate(loader):
        train(net, [batch], optimizer)
        if i == 9:
            break


def next_by_hand(keep: Kept) -> None:
    it = iter(DataLoader(data(96), batch_size=4, shuffle=True))
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(12):
        train(net, [next(it)], optimizer)


def endless(keep: Kept) -> None:
    loader = DataLoader(data(20), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    it = iter(loader)
    for _ in range(13):
        try:
            batch = next(it)
        except StopIteration:
            it = iter(loader)
            batch = next(it)
        train(net, [batch], optimizer)


def workers(keep: Kept, *, persistent: bool = False) -> None:
    loader = DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=2, persistent_workers=persistent)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _epoch in range(2):
        train(net, loader, optimizer)


def persistent_workers(keep: Kept) -> None:
    workers(keep, persistent=True)


def iterable(keep: Kept) -> None:
    train(model(keep), DataLoader(Stream(), batch_size=5))


def scheduled(keep: Kept) -> None:
    loader = DataLoader(data(96), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    keep.append(scheduler)
    for batch in loader:
        train(net, [batch], optimizer)
        scheduler.step()


def accumulated(keep: Kept, *, samples: int = 96, epochs: int = 1) -> None:
    loader = DataLoader(data(samples), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    count = 0
    for _epoch in range(epochs):
        for x, y in loader:
            (cross_entropy(net(x), y) / 4).backward()
            count += 1
            if count % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


def accumulated_over_epochs(keep: Kept) -> None:
    accumulated(keep, samples=40, epochs=4)


def once_per_epoch(keep: Kept) -> None:
    loader = DataLoader(data(20), batch_size=4)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _epoch in range(7):
        optimizer.zero_grad()
        for x, y in loader:
            cross_entropy(net(x), y).backward()
        optimizer.step()


def scaled(keep: Kept) -> None:
    loader = DataLoader(data(48), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(net(x), y)
        if i in (0, 4):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def gan(keep: Kept, batches: Iterable[Any] | None = None) -> None:
    batches = batches or DataLoader(data(60), batch_size=4, shuffle=True)
    critic, maker = nn.Linear(8, 1), nn.Linear(4, 8)
    keep += [critic, maker]
    d = torch.optim.Adam(critic.parameters(), lr=1e-2)
    g = torch.optim.Adam(maker.parameters(), lr=1e-2)
    for real, _ in batches:
        fake = maker(torch.randn(len(real), 4))
        d.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        d.step()
        g.zero_grad()
        (-critic(fake).mean()).backward()
        g.step()


def lbfgs(keep: Kept, batches: Iterable[Any] | None = None) -> None:
    batches = batches or DataLoader(data(64), batch_size=8, shuffle=True)
    net = nn.Linear(8, 3)
    keep.append(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    for x, y in batches:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)


def zipped(keep: Kept) -> None:
    labelled, unlabelled = DataLoader(data(40), batch_size=4, shuffle=True), DataLoader(data(70), batch_size=10)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _epoch in range(2):
        for (x, y), (u, _) in zip(labelled, unlabelled, strict=False):
            optimizer.zero_grad()
            (cross_entropy(net(x), y) + net(u).var()).backward()
            optimizer.step()


def two_loaders_one_endless(keep: Kept) -> None:
    main, other = DataLoader(data(40), batch_size=4, shuffle=True), DataLoader(data(12), batch_size=4)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    it = iter(other)
    for x, y in main:
        try:
            u, _ = next(it)
        except StopIteration:
            it = iter(other)
            u, _ = next(it)
        optimizer.zero_grad()
        (cross_entropy(net(x), y) + net(u).var()).backward()
        optimizer.step()


# -- evaluation ----------------------------------------------------------------------------------------------------


def evaluated(keep: Kept) -> None:
    points = data(60)
    training, val = DataLoader(points, batch_size=6, shuffle=True), DataLoader(points, batch_size=10)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _epoch in range(2):
        net.train()
        train(net, training, optimizer)
        net.eval()
        with torch.no_grad():
            correct = sum(int((net(x).argmax(1) == y).sum()) for x, y in val)
        keep.append(torch.tensor(correct))


def evaluated_before_and_anew(keep: Kept) -> None:
    """Evaluates before training too; makes its loaders afresh each epoch; the no_grad is inside of the loop."""
    points = data(60)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def evaluate() -> None:
        for x, y in DataLoader(points, batch_size=10):
            with torch.no_grad():
                cross_entropy(net(x), y)

    evaluate()
    for _epoch in range(3):
        train(net, DataLoader(points, batch_size=6, shuffle=True), optimizer)
        evaluate()


def evaluated_within_epoch(keep: Kept) -> None:
    """Every fifth step a few batches of validation, left early."""
    training, val = DataLoader(data(100), batch_size=5, shuffle=True), DataLoader(data(60), batch_size=10)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, batch in enumerate(training):
        train(net, [batch], optimizer)
        if i % 5 == 4:
            for xv, _ in itertools.islice(val, 3):
                net(xv)


def evaluated_on_training_data(keep: Kept) -> None:
    loader = DataLoader(data(40), batch_size=5, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _epoch in range(3):
        train(net, loader, optimizer)
        for x, _ in loader:
            net(x)


def evaluated_amid_accumulation(keep: Kept) -> None:
    """Validates every 6 batches, in the middle of every other accumulation of 4."""
    training, val = DataLoader(data(144), batch_size=6, shuffle=True), DataLoader(data(30), batch_size=10)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(training):
        cross_entropy(net(x), y).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if (i + 1) % 6 == 0:
            for xv, _ in val:
                net(xv)


# -- no DataLoader -------------------------------------------------------------------------------------------------


def slices(samples: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches of 4."""
    return zip(*(tensor.split(4) for tensor in data(samples).tensors), strict=True)


def sliced(keep: Kept) -> None:
    net = model(keep)
    train(net, slices(96), torch.optim.AdamW(net.parameters(), lr=1e-2))


def memory_mapped(keep: Kept, path: Path) -> None:
    tokens = np.memmap(path, dtype=np.uint16, mode="w+", shape=(500,))
    tokens[:] = np.arange(500) % 11
    net = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    keep.append(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(15):
        at = torch.randint(490, (4,))
        x = torch.stack([torch.from_numpy(tokens[i : i + 8].astype(np.int64)) for i in at])
        y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 9].astype(np.int64)) for i in at])
        loss = cross_entropy(net(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def sliced_scaled_and_scheduled(keep: Kept) -> None:
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    keep += [scheduler, scaler]
    for x, y in slices(96):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(net(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


def sliced_gan(keep: Kept) -> None:
    gan(keep, slices(80))


def sliced_lbfgs(keep: Kept) -> None:
    lbfgs(keep, [data(32).tensors] * 8)


def optimizers_compared(keep: Kept) -> None:
    """The same model trained twice, by two optimizers, one after the other."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        net = model(keep)
        train(net, [data(32).tensors] * 10, kind(net.parameters(), lr=1e-2))


def cached(keep: Kept) -> None:
    """All batches are fetched first, then used over and over."""
    batches = list(DataLoader(data(40), batch_size=4, shuffle=True))
    train(model(keep), 2 * batches)


# -- no optimizer --------------------------------------------------------------------------------------------------


def inference(keep: Kept) -> None:
    net = model(keep).eval()
    out = [net(x) for x, _ in DataLoader(data(60), batch_size=4)]
    keep.append(torch.cat(out).detach())


def inference_without_grad(keep: Kept) -> None:
    net = model(keep).eval()
    with torch.inference_mode():
        for x, _ in DataLoader(data(60), batch_size=4):
            net(x)


def inference_left_early(keep: Kept) -> None:
    net = model(keep).eval()
    with torch.no_grad():
        for i, (x, _) in enumerate(DataLoader(data(60), batch_size=4)):
            net(x)
            if i == 9:
                break


def inference_zipped(keep: Kept) -> None:
    net = model(keep).eval()
    longer, shorter = DataLoader(data(48), batch_size=4), DataLoader(data(90), batch_size=9)
    with torch.no_grad():
        for _pass in range(2):
            for (x, _), (u, _) in zip(longer, shorter, strict=False):
                keep.append(net(x).sum() + net(u).sum())


def by_hand(keep: Kept) -> None:
    w = torch.zeros(8, 3, requires_grad=True)
    keep.append(w)
    for x, y in DataLoader(data(80), batch_size=4, shuffle=True):
        cross_entropy(x @ w, y).backward()
        with torch.no_grad():
            assert w.grad is not None
            w -= 0.1 * w.grad
        w.grad.zero_()


def by_hand_on_data(keep: Kept) -> None:
    """The old way, which leaves no trace in a tensor's version."""
    net = model(keep)
    for x, y in DataLoader(data(80), batch_size=4, shuffle=True):
        net.zero_grad()
        cross_entropy(net(x), y).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.data.sub_(0.1 * p.grad.data)


# -- no step at all ------------------------------------------------------------------------------------------------


def tensors_only(keep: Kept) -> None:
    x = torch.randn(64, 64)
    for _ in range(20):
        x = torch.tanh(x @ x.T)
    keep.append(x)


def model_called(keep: Kept) -> None:
    net = model(keep).eval()
    with torch.no_grad():
        for _ in range(20):
            out = net(torch.randn(4, 8))
    keep.append(out)


# -- bad ends ------------------------------------------------------------------------------------------------------


def failing(keep: Kept, error: BaseException, at: int) -> None:
    loader = DataLoader(data(96), batch_size=4, shuffle=True)
    net = model(keep)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        if i == at:
            raise error
        loss.backward()
        optimizer.step()


def many_steps(keep: Kept) -> None:
    w = torch.zeros(4, requires_grad=True)
    keep.append(w)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(3000):
        optimizer.zero_grad()
        mse_loss(w, torch.ones(4)).backward()
        optimizer.step()


def six_steps(keep: Kept) -> None:
    train(model(keep), DataLoader(data(24), batch_size=4, shuffle=True))
