# /// cell
# causes = ["slow_collate"]
# because = "each line of each grid is written into the matrix of admittances by itself, twice"
# framework = "accelerate"
# batch = 32
# steps = 36
# warmup = 6
# cohort = "2026-11-22c"
#
# [[cure]]
# old = '''
#         for (a, b), y in zip(s.lines.T.tolist(), s.susceptance.tolist(), strict=True):
#             weights[k, a, b] += y
#             weights[k, b, a] += y
# '''
# new = '''
#         there, back = s.lines, s.lines.flip(0)
#         ends = torch.cat([there, back], 1)
#         weights[k].index_put_((ends[0], ends[1]), s.susceptance.repeat(2), accumulate=True)
# '''
# ///
"""Which lines of a power grid will be overloaded: a graph network over switching states, trained with Accelerate."""

import random
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

random.seed(380)
torch.manual_seed(380)


@dataclass
class Snapshot:
    injections: torch.Tensor  # per bus: MW, MVAr, whether a generator is there
    lines: torch.Tensor  # (2, lines in service)
    susceptance: torch.Tensor
    overloaded: torch.Tensor  # per bus: whether one of its lines is


def snapshots(count, low=40, high=64):
    for _ in range(count):
        buses = random.randint(low, high)
        tree = [(bus, random.randrange(max(0, bus - 6), bus)) for bus in range(1, buses)]
        meshed = {tuple(random.sample(range(buses), 2)) for _ in range(buses // 2)}
        lines = torch.tensor(tree + sorted(meshed)).T.contiguous()
        susceptance = torch.rand(lines.shape[1]) * 9 + 1
        injections = torch.randn(buses, 3)
        flow = susceptance * (injections[lines[0], 0] - injections[lines[1], 0]).abs()
        overloaded = torch.zeros(buses)
        overloaded[lines[:, flow > 12].flatten()] = 1.0
        yield Snapshot(injections, lines, susceptance, overloaded)


def collate(batch):
    """Pads to the largest grid; the normalised admittances become a dense matrix."""
    largest = max(len(s.injections) for s in batch)
    injections = torch.zeros(len(batch), largest, 3)
    overloaded = torch.zeros(len(batch), largest)
    present = torch.zeros(len(batch), largest)
    weights = torch.zeros(len(batch), largest, largest)
    for k, s in enumerate(batch):
        n = len(s.injections)
        injections[k, :n] = s.injections
        overloaded[k, :n] = s.overloaded
        present[k, :n] = 1.0
        for (a, b), y in zip(s.lines.T.tolist(), s.susceptance.tolist(), strict=True):
            weights[k, a, b] += y
            weights[k, b, a] += y
    weights = weights + torch.eye(largest)
    root = weights.sum(-1).rsqrt()
    return injections, weights * root[:, :, None] * root[:, None, :], overloaded, present


class GridNet(nn.Module):
    def __init__(self, width=96, rounds=3):
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.rounds = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.read = nn.Linear(width, 1)

    def forward(self, injections, weights):
        h = self.lift(injections)
        for mix in self.rounds:
            h = h + torch.relu(mix(torch.cat([h, weights @ h], -1)))
        return self.read(h).squeeze(-1)


grids = list(snapshots(768))

# %% the training cell
accelerator = Accelerator(cpu=True)
net = GridNet()
model, optimizer, loader = accelerator.prepare(
    net,
    torch.optim.Adam(net.parameters(), lr=1e-3, fused=True),
    DataLoader(grids, batch_size=32, shuffle=True, collate_fn=collate),
)
for epoch in range(6):
    for injections, weights, overloaded, present in loader:
        logits = model(injections, weights)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, overloaded, weight=present)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} {loss.item():.4f}")
