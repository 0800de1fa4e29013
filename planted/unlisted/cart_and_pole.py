# /// cell
# because = "320 environments are stepped in Python before each update"
# callee = "Environments.step"
# own = "environments"
# ///
"""A pole is balanced: 320 carts are simulated in Python, and a small network is asked what to do."""

import torch
from environments import Environments
from torch import nn

torch.manual_seed(14)
carts = Environments(320)
policy = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
state = torch.tensor(carts.reset())
# %% the training cell
for step in range(350):
    choice = torch.distributions.Categorical(logits=policy(state))
    action = choice.sample()
    state, rewards = carts.step(action.tolist())  # HOT
    state = torch.tensor(state)
    loss = -(choice.log_prob(action) * torch.tensor(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
