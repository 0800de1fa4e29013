# /// cell
# cohort = "fourth"
# because = "The CSV history keeps all rows in memory and writes the whole file again after every update, so each update gets slower as the run goes on (quadratic in all). Cure: append only the new rows and rewrite the file only when the columns change."
# thread = "https://github.com/Lightning-AI/pytorch-lightning/issues/17725"
# line = "writer.writerows(self.rows)"
# callee = "csv.DictWriter.writerows"
# faster = 3.0
# ///
import csv
import math
import os
import tempfile

import torch
import torch.nn as nn

torch.manual_seed(0)
folder = tempfile.mkdtemp()


class RunHistory:
    def __init__(self, folder):
        self.path = os.path.join(folder, "metrics.csv")
        self.rows = []
        self.columns = []

    def log(self, **values):
        self.rows.append(values)

    def save(self):
        if not self.rows:
            return
        for key in self.rows[-1]:
            if key not in self.columns:
                self.columns.append(key)
        with open(self.path, "w", newline="") as f:
            writer = csv.DictWriter(f, fieldnames=self.columns)
            writer.writeheader()
            writer.writerows(self.rows)


class Pendulums:
    def __init__(self, n):
        self.n = n
        self.angle = (torch.rand(n) * 2 - 1) * math.pi
        self.speed = torch.rand(n) * 2 - 1

    def observe(self):
        return torch.stack([torch.cos(self.angle), torch.sin(self.angle), self.speed], dim=1)

    def step(self, torque):
        torque = torque.clamp(-2, 2)
        wrapped = (self.angle + math.pi) % (2 * math.pi) - math.pi
        cost = wrapped ** 2 + 0.1 * self.speed ** 2 + 0.001 * torque ** 2
        self.speed = (self.speed + 0.05 * (15 * torch.sin(self.angle) + 3 * torque)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        return self.observe(), -cost


actor = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
critic = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
log_std = nn.Parameter(torch.zeros(1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters(), log_std], lr=7e-4)
env = Pendulums(32)
history = RunHistory(folder)
n_updates, n_steps, gamma = 1250, 4, 0.95

# %% the training cell
obs = env.observe()
for update in range(n_updates):
    log_probs, values, rewards = [], [], []
    for _ in range(n_steps):
        dist = torch.distributions.Normal(actor(obs).squeeze(1), log_std.exp())
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        values.append(critic(obs).squeeze(1))
        obs, reward = env.step(action)
        rewards.append(reward)
    with torch.no_grad():
        target = critic(obs).squeeze(1)
    returns = []
    for reward in reversed(rewards):
        target = reward + gamma * target
        returns.insert(0, target)
    returns = torch.stack(returns)
    values = torch.stack(values)
    advantage = returns - values.detach()
    policy_loss = -(torch.stack(log_probs) * advantage).mean()
    value_loss = (returns - values).pow(2).mean()
    entropy = log_std.sum() + 0.5 * math.log(2 * math.pi * math.e)
    loss = policy_loss + 0.5 * value_loss - 0.001 * entropy
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
    optimizer.step()
    history.log(
        update=update,
        frames=(update + 1) * n_steps * env.n,
        loss=float(loss.detach()),
        policy_loss=float(policy_loss.detach()),
        value_loss=float(value_loss.detach()),
        entropy=float(entropy.detach()),
        reward=float(torch.stack(rewards).mean()),
        advantage=float(advantage.mean()),
        grad_norm=float(grad_norm),
        lr=optimizer.param_groups[0]["lr"],
    )
    history.save()
    if update % 250 == 0:
        print(f"update {update} loss {loss.item():.4f} reward {torch.stack(rewards).mean().item():.3f}")
