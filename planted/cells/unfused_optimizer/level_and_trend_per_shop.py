# /// cell
# causes = ["unfused_optimizer"]
# because = "960 tiny tensors, for each of which SGD with momentum calls five operations"
# batch = 90
# steps = 40
# profiled = 100
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = '"foreach": False'
# new = '"fused": True'
# ///
"""Sales of 240 shops: each has a level, a trend, a week and an answer to offers, which are parameters of its own."""

import torch
from torch import nn

torch.manual_seed(26)
SHOPS, DAYS = 240, 720
day = torch.arange(DAYS)
offers = (torch.rand(DAYS, SHOPS, 4) < 0.1).float()
sales = (
    3
    + 0.5 * torch.sin(day[:, None] * 6.283 / 7 + torch.arange(SHOPS))
    + offers.sum(-1) * 0.4
    + 0.2 * torch.randn(DAYS, SHOPS)
)


class Shop(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.zeros(()))
        self.trend = nn.Parameter(torch.zeros(()))
        self.week = nn.Parameter(torch.zeros(7))
        self.answer = nn.Parameter(torch.zeros(4))


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.shops = nn.ModuleDict({f"shop {i:03}": Shop() for i in range(SHOPS)})

    def gathered(self, name):
        return torch.stack([getattr(shop, name) for shop in self.shops.values()])

    def forward(self, days, offers):
        time = (days / DAYS).unsqueeze(1)
        weekday = nn.functional.one_hot(days % 7, 7).float()
        known = self.gathered("level") + time * self.gathered("trend") + weekday @ self.gathered("week").T
        return known + torch.einsum("dsk,sk->ds", offers, self.gathered("answer"))


def pinball(forecast, truth, quantile=0.6):
    missed = truth - forecast
    return torch.maximum(quantile * missed, (quantile - 1) * missed).mean()


chain = Chain()
settings = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-5, "foreach": False}

# %% the training cell
optimizer = torch.optim.SGD(chain.parameters(), **settings)
for epoch in range(40):
    for days in torch.randperm(DAYS).split(90):
        optimizer.zero_grad()
        loss = pinball(chain(days, offers[days]), sales[days])
        loss.backward()
        optimizer.step()
    if epoch % 10 == 0:
        print(f"{epoch:3} {loss.item():.4f}")
