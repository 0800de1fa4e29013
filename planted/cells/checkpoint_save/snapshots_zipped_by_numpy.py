# /// cell
# causes = ["checkpoint_save"]
# because = "every fourth step all weights are compressed into a zip of NumPy arrays, for a ring of three snapshots"
# batch = 32
# steps = 24
# warmup = 4
# cohort = "2026-11-23"
#
# [[cure]]
# old = "--snapshot-every 4 "
# new = "--snapshot-every 200 "
# ///
"""train.py, pasted into a notebook. Predicts 3-day ozone for 40 stations."""

import argparse
import shlex
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--stations", type=int, default=40)
parser.add_argument("--history", type=int, default=14)
parser.add_argument("--hidden", type=int, default=320)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--steps", type=int, default=160)
parser.add_argument("--snapshot-every", type=int, default=100)
parser.add_argument("--out", type=Path, default=Path("snapshots"))


class Snapshots:
    """Keeps the last three; the MATLAB people can only read npz."""

    def __init__(self, folder, keep=3):
        folder.mkdir(exist_ok=True)
        self.slots = cycle(folder / f"weights_{i}.npz" for i in range(keep))

    def write(self, model, step):
        arrays = {k.replace(".", "_"): v.numpy() for k, v in model.state_dict().items()}
        np.savez_compressed(next(self.slots), step=step, **arrays)


def ozone(stations, days=4000):
    t = torch.arange(days)[:, None]
    season = 60 + 30 * torch.sin(2 * torch.pi * t / 365 + torch.rand(stations))
    weather = torch.randn(days, stations).cumsum(0)
    weather = weather - torch.nn.functional.avg_pool1d(weather.T[None], 31, 1, 15, count_include_pad=False)[0].T
    return (season + 4 * weather) / 100


def main(args):
    torch.manual_seed(8)
    series = ozone(args.stations)
    model = torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(args.stations * args.history, args.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(args.hidden, args.hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(args.hidden, args.stations * 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    snapshots = Snapshots(args.out)
    for step in range(1, args.steps + 1):
        start = torch.randint(0, len(series) - args.history - 3, (args.batch_size,))
        days = start[:, None] + torch.arange(args.history + 3)
        window = series[days]
        past, future = window[:, : args.history], window[:, args.history :]
        loss = (model(past) - future.flatten(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.snapshot_every == 0:
            snapshots.write(model, step)
    print(f"last loss {loss.item():.4f}")


# %% the training cell
main(parser.parse_args(shlex.split("--snapshot-every 4 --hidden 320")))
