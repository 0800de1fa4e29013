# /// cell
# causes = ["small_batch"]
# because = "a step for one crystal costs nearly as much as one for 16"
# cured_batch = 16
# steps = 120
# warmup = 20
# profiled = 400
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "split(1)"
# new = "split(16)"
# ///
"""Energies of crystals by message passing between their atoms; one crystal after the other goes through the network."""

import torch
from torch import nn

torch.manual_seed(24)
CRYSTALS, ATOMS, KINDS = 3000, 12, 20
kinds = torch.randint(0, KINDS, (CRYSTALS, ATOMS))
places = torch.rand(CRYSTALS, ATOMS, 3) * 4
distances = torch.cdist(places, places)
near = torch.exp(-((distances.unsqueeze(-1) - torch.linspace(0.5, 3, 6)) ** 2) / 0.2)  # six shells
energies = (-near[..., 1] * torch.cos(kinds.float()).unsqueeze(1)).sum((1, 2)) / ATOMS


class Round(nn.Module):
    def __init__(self, width, shells=6):
        super().__init__()
        self.send = nn.Linear(width, width * shells, bias=False)
        self.update = nn.GRUCell(width, width)
        self.shells = shells

    def forward(self, h, near):
        sent = self.send(h).unflatten(-1, (self.shells, -1))  # crystal, atom, shell, width
        message = torch.einsum("bijs,bjsw->biw", near, sent)
        return self.update(message.flatten(0, 1), h.flatten(0, 1)).view_as(h)


class Potential(nn.Module):
    def __init__(self, width=24, rounds=3):
        super().__init__()
        self.embed = nn.Embedding(KINDS, width)
        self.rounds = nn.ModuleList(Round(width) for _ in range(rounds))
        self.read = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, near):
        h = self.embed(kinds)
        for round in self.rounds:
            h = round(h, near)
        return self.read(h).mean((1, 2))


potential = Potential()
optimizer = torch.optim.AdamW(potential.parameters(), lr=1e-3, fused=True)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

# %% the training cell
for epoch in range(2):
    errors = []
    for crystal in torch.randperm(CRYSTALS).split(1):
        guess = potential(kinds[crystal], near[crystal])
        loss = nn.functional.l1_loss(guess, energies[crystal])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(potential.parameters(), 5.0)
        optimizer.step()
        errors.append(loss.detach())
    schedule.step()
    print(f"{epoch}: mean error {torch.stack(errors).mean():.3f}")
