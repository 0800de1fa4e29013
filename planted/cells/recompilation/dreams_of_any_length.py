# /// cell
# causes = ["recompilation"]
# because = "the loop over the horizon is compiled anew for each length that is drawn"
# batch = 64
# steps = 8
# warmup = 2
# profiled = 25
# fresh = true
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = 'torch.compile(world, backend="aot_eager")'
# new = "world"
# ///
"""A compiled world model dreams ahead; how far is drawn anew for each batch."""

import random

import torch
from torch import nn

random.seed(1)
torch.manual_seed(1)
STATE, ACTION, FARTHEST = 24, 4, 12


class WorldModel(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.into = nn.Linear(STATE + ACTION, hidden)
        self.out = nn.Linear(hidden, STATE)

    def forward(self, state, actions, horizon):
        dreamt = []
        for ahead in range(horizon):
            h = torch.tanh(self.into(torch.cat([state, actions[:, ahead]], -1)))
            state = state + self.out(h)
            dreamt.append(state)
        return torch.stack(dreamt, 1)


episodes = torch.randn(256, FARTHEST + 1, STATE).cumsum(1) * 0.1
actions = torch.randn(256, FARTHEST, ACTION)
world = WorldModel()
optimizer = torch.optim.Adam(world.parameters(), lr=1e-3, fused=True)

# %% the training cell
torch._dynamo.config.recompile_limit = 100  # or it gives up after the eighth
dream = torch.compile(world, backend="aot_eager")
losses = []
for step in range(40):
    horizon = random.randint(2, FARTHEST)
    i = torch.randint(len(episodes), (64,))
    predicted = dream(episodes[i, 0], actions[i], horizon)
    loss = nn.functional.mse_loss(predicted, episodes[i, 1 : horizon + 1])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(world.parameters(), 10.0)
    optimizer.step()
    losses.append(loss.detach())
