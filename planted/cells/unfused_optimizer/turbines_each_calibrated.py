# /// cell
# causes = ["unfused_optimizer"]
# because = "AdamW goes through 1200 small tensors one by one"
# batch = 16
# cohort = "2026-11-22b"
#
# [[cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""Power fed into the grid from what 600 wind turbines report, each with a learned calibration."""

import torch
from torch import nn

torch.manual_seed(76)
TURBINES, REPORTED = 600, 6


class Calibration(nn.Module):
    """A small matrix and an offset per turbine, kept apart to be swapped with its sensors."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList([torch.eye(REPORTED) for _ in range(TURBINES)])
        self.offsets = nn.ParameterList([torch.zeros(REPORTED) for _ in range(TURBINES)])

    def forward(self, reports):
        matrices = torch.stack(list(self.matrices))
        return torch.einsum("btr,trs->bts", reports, matrices) + torch.stack(list(self.offsets))


class Grid(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.calibration = Calibration()
        self.power = nn.Sequential(nn.Linear(REPORTED, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, reports):
        return self.power(self.calibration(reports)).mean(dim=(1, 2))


reports = torch.randn(2000, TURBINES, REPORTED)
drifted = reports * (1 + 0.2 * torch.randn(TURBINES, REPORTED))
fed = torch.sigmoid(drifted[..., 0] + 0.3 * drifted[..., 2]).mean(1)

# %% the training cell
grid = Grid()
optimizer = torch.optim.AdamW(
    [
        {"params": grid.calibration.parameters(), "lr": 1e-3, "weight_decay": 0.0},
        {"params": grid.power.parameters(), "lr": 4e-3},
    ],
    foreach=False,
)
for epoch in range(4):
    for hours in torch.randperm(len(reports)).split(16):
        optimizer.zero_grad()
        off = (grid(reports[hours]) - fed[hours]).abs().mean()
        off.backward()
        optimizer.step()
