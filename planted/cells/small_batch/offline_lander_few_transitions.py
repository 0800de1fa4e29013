# /// cell
# causes = ["small_batch"]
# because = "a step for 6 transitions costs nearly as much as one for 96"
# batch = 6
# cured_batch = 96
# steps = 200
# warmup = 20
# profiled = 800
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = "sampled = 6\n"
# new = "sampled = 96\n"
# ///
"""A lander learns from a log of old flights (double Q-learning, conservative), of which it samples a handful a step."""

import copy

import torch
from torch import nn

torch.manual_seed(23)


class Log:
    """Transitions of old flights, all in memory."""

    def __init__(self, n=20_000, seen=8, actions=4):
        self.state = torch.randn(n, seen)
        self.action = torch.randint(0, actions, (n, 1))
        self.after = self.state + 0.1 * torch.randn(n, seen) * (1 + self.action)
        self.reward = -self.after[:, :2].norm(dim=1) + self.state[:, :2].norm(dim=1)
        self.landed = (torch.rand(n) < 0.02).float()

    def sample(self, k):
        i = torch.randint(0, len(self.reward), (k,))
        return self.state[i], self.action[i], self.reward[i], self.after[i], self.landed[i]


class Dueling(nn.Module):
    def __init__(self, seen=8, actions=4, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(seen, width),
            nn.LayerNorm(width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.SiLU(),
        )
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, actions)

    def forward(self, state):
        h = self.body(state)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


class Agent:
    def __init__(self, gamma=0.99, tau=0.005, alpha=0.2):
        self.q = Dueling()
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=3e-4, fused=True)
        self.gamma, self.tau, self.alpha = gamma, tau, alpha

    def learn(self, state, action, reward, after, landed):
        with torch.no_grad():
            best = self.q(after).argmax(1, keepdim=True)
            goal = reward + self.gamma * (1 - landed) * self.target(after).gather(1, best).squeeze(1)
        q = self.q(state)
        taken = q.gather(1, action).squeeze(1)
        loss = nn.functional.huber_loss(taken, goal) + self.alpha * (q.logsumexp(1) - taken).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.q.parameters()), self.tau)
        return loss


log, agent = Log(), Agent()

# %% the training cell
sampled = 6
for update in range(1500):
    loss = agent.learn(*log.sample(sampled))
    if update % 500 == 499:
        print(update + 1, f"{loss.item():.3f}")
