# /// cell
# causes = ["recompilation"]
# because = "dynamic=False: compiled anew for each batch, as each has another number of atoms"
# batch = 24
# steps = 6
# warmup = 2
# profiled = 16
# fresh = true
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "dynamic=False"
# new = "dynamic=True"
# ///
"""Energies of molecules by message passing, compiled; each batch is one graph, and has its own number of atoms."""

import torch
from torch import nn

torch.manual_seed(70)
KINDS = 8


class Interaction(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU())
        self.update = nn.Linear(width, width)

    def forward(self, atoms, source, target, distance):
        sent = self.message(torch.cat([atoms[source], atoms[target], distance], -1))
        received = torch.zeros_like(atoms).index_add(0, target, sent)
        return atoms + self.update(received)


class Energy(nn.Module):
    def __init__(self, width=64, depth=1):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, width)
        self.interactions = nn.ModuleList(Interaction(width) for _ in range(depth))
        self.readout = nn.Linear(width, 1)

    def forward(self, kinds, source, target, distance, molecule, energies):
        atoms = self.kinds(kinds)
        for interact in self.interactions:
            atoms = interact(atoms, source, target, distance)
        per_atom = self.readout(atoms).squeeze(-1)
        return torch.zeros_like(energies).index_add(0, molecule, per_atom)


def batch_of_molecules(count=24):
    """Between 6 and 20 atoms each, and three bonds for each atom."""
    sizes = torch.randint(6, 21, (count,))
    molecule = torch.repeat_interleave(torch.arange(count), sizes)
    first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    target = torch.arange(len(molecule)).repeat(3)
    source = (first + (torch.rand(len(molecule)) * sizes[molecule]).long()).repeat(3)
    kinds = torch.randint(0, KINDS, (len(molecule),))
    return kinds, source, target, torch.rand(len(source), 1), molecule, torch.randn(count)


batches = [batch_of_molecules() for _ in range(36)]

# %% the training cell
torch._dynamo.config.recompile_limit = 512
energy = Energy()
fast = torch.compile(energy, backend="aot_eager", dynamic=False)
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3, fused=True)
for epoch in range(2):
    for *graph, energies in batches:
        optimizer.zero_grad()
        nn.functional.l1_loss(fast(*graph, energies), energies).backward()
        optimizer.step()
