# /// cell
# because = "GAE is computed in a Python loop over 1024 steps with zero-dimensional tensors; in numpy / floats (or numba) the same recursion takes a fraction."
# thread = "https://github.com/thu-ml/tianshou/issues/483"
# line = "delta = rewards[t] + gamma * values[t + 1] * (1 - dones[t]) - values[t]"
# callee = "gae"
# faster = 3.61
# ///
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(0)
T = 1024


def gae(rewards, values, dones, gamma=0.99, lam=0.95):
    advantages = torch.zeros(len(rewards))
    last = 0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * values[t + 1] * (1 - dones[t]) - values[t]
        last = delta + gamma * lam * (1 - dones[t]) * last
        advantages[t] = last
    return advantages


actor = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
critic = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
log_std = nn.Parameter(torch.zeros(3))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters(), log_std], lr=3e-4)


def rollout():
    obs = torch.randn(T + 1, 12)
    with torch.no_grad():
        dist = Normal(actor(obs[:-1]), log_std.exp())
        actions = dist.sample()
        return obs, actions, dist.log_prob(actions).sum(1), -(actions - obs[:-1, :3]).pow(2).sum(1), (torch.rand(T) < 0.01).float(), critic(obs).squeeze(1)
# %% the training cell
for iteration in range(40):
    obs, actions, old_logp, rewards, dones, values = rollout()
    adv = gae(rewards, values, dones)
    returns = adv + values[:-1]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for idx in torch.randperm(T).split(256):
        dist = Normal(actor(obs[idx]), log_std.exp())
        ratio = (dist.log_prob(actions[idx]).sum(1) - old_logp[idx]).exp()
        policy_loss = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
        value_loss = (critic(obs[idx]).squeeze(1) - returns[idx]).pow(2).mean()
        loss = policy_loss + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if iteration % 10 == 0:
        print(iteration, rewards.mean().item())
