# /// cell
# causes = ["cpu_oversubscribed"]
# because = "four threads on two cores wait for each other in each small convolution"
# batch = 32
# steps = 20
# profiled = 40
# fresh = true
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "num_threads: int = 4"
# new = "num_threads: int = 1"
# ///
"""PPO from pixels with a residual network, on stored rollouts; its configuration has the threads of the big node."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class PPOConfig:
    screen: int = 24
    actions: int = 15
    steps: int = 1600
    minibatch: int = 32
    epochs: int = 3
    clip: float = 0.2
    entropy: float = 0.01
    num_threads: int = 4


config = PPOConfig()
torch.set_num_threads(config.num_threads)
torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(torch.relu(x))))


def section(inputs, width):
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1), Residual(width), Residual(width)
    )


class ActorCritic(nn.Module):
    """The network of IMPALA, narrow."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(section(3, 8), section(8, 16), section(16, 16), nn.ReLU(), nn.Flatten())
        self.actor, self.critic = nn.Linear(144, config.actions), nn.Linear(144, 1)

    def forward(self, screens):
        h = self.body(screens)
        return Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


agent = ActorCritic()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5, fused=True)
screens = torch.rand(config.steps, 3, config.screen, config.screen)
with torch.no_grad():
    policy, values = agent(screens)
    actions = policy.sample()
    log_probs = policy.log_prob(actions)
advantages = torch.randn(config.steps)
rollouts = TensorDataset(screens, actions, log_probs, advantages, values + advantages)

# %% the training cell
loader = DataLoader(rollouts, batch_size=config.minibatch, shuffle=True)
for epoch in range(config.epochs):
    for screen, action, old, advantage, value_target in loader:
        policy, value = agent(screen)
        ratio = torch.exp(policy.log_prob(action) - old)
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        value_loss = (value - value_target).pow(2).mean()
        loss = policy_loss + 0.5 * value_loss - config.entropy * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
