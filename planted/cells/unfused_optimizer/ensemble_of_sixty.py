# /// cell
# causes = ["unfused_optimizer"]
# because = "360 small tensors, for each of which AdamW calls more than a dozen operations, also by foreach"
# batch = 1440
# steps = 40
# profiled = 100
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "foreach=True"
# new = "fused=True"
# ///
"""Sixty small networks guess the strength of an alloy; their spread says how sure they are. AdamW, by foreach."""

import torch
from torch import nn

torch.manual_seed(7)
MEMBERS = 60
compositions = torch.rand(4000, 16)
strength = (compositions @ torch.randn(16, 1)).sin() + 0.1 * torch.randn(4000, 1)


def member():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class Ensemble(nn.Module):
    """The members are networks of their own, to be saved one by one, but are computed side by side."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(member() for _ in range(MEMBERS))

    def forward(self, x):
        for position, layer in enumerate(self.members[0]):
            if isinstance(layer, nn.Linear):
                weight = torch.stack([m[position].weight for m in self.members])
                bias = torch.stack([m[position].bias for m in self.members])
                x = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
            else:
                x = layer(x)
        return x


ensemble = Ensemble()
decayed = [p for p in ensemble.parameters() if p.ndim > 1]
plain = [p for p in ensemble.parameters() if p.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
    lr=1e-3,
    amsgrad=True,
    foreach=True,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

# %% the training cell
for step in range(200):
    chosen = torch.randint(len(compositions), (MEMBERS, 24))  # each member has samples of its own
    guessed = ensemble(compositions[chosen])
    loss = nn.functional.mse_loss(guessed, strength[chosen], reduction="none").mean((1, 2)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
