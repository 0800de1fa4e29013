# /// cell
# cohort = "third"
# because = "The observations of a rollout are a list of numpy arrays and go to torch.tensor as a list, which reads them element by element; put them together with numpy (np.array or np.stack) first."
# thread = "https://github.com/Unity-Technologies/ml-agents/issues/5811"
# line = "observations = torch.tensor(seen, dtype=torch.float32)"
# callee = "torch.tensor"
# faster = 3.4
# ///
import warnings

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

warnings.filterwarnings("ignore", category=UserWarning)
torch.manual_seed(0)
MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])


class Mazes:
    """Many small mazes: walk from anywhere to the goal."""

    def __init__(self, n=64, size=12, seed=0):
        self.rng, self.n, self.size = np.random.default_rng(seed), n, size
        self.walls = (self.rng.random((n, size, size)) < 0.2).astype(np.float32)
        self.at = self.rng.integers(0, size, (n, 2))
        self.goal = self.rng.integers(0, size, (n, 2))

    def observe(self):
        seen = np.zeros((self.n, 3, self.size, self.size), dtype=np.float32)
        every = np.arange(self.n)
        seen[:, 0] = self.walls
        seen[every, 1, self.at[:, 0], self.at[:, 1]] = 1
        seen[every, 2, self.goal[:, 0], self.goal[:, 1]] = 1
        return seen.reshape(self.n, -1)

    def step(self, actions):
        every = np.arange(self.n)
        wanted = np.clip(self.at + MOVES[actions], 0, self.size - 1)
        free = self.walls[every, wanted[:, 0], wanted[:, 1]] == 0
        self.at = np.where(free[:, None], wanted, self.at)
        done = (self.at == self.goal).all(1)
        self.at[done] = self.rng.integers(0, self.size, (done.sum(), 2))
        return self.observe(), np.where(done, 1.0, -0.02).astype(np.float32), done


class Agent(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return Categorical(logits=self.policy(h), validate_args=False), self.value(h).squeeze(-1)


mazes = Mazes()
agent = Agent(3 * 12 * 12)
optimizer = torch.optim.Adam(agent.parameters(), lr=7e-4)

# %% the training cell
seen_now = mazes.observe()
for update in range(80):
    seen, actions, rewards, dones = [], [], [], []
    for _ in range(16):
        with torch.no_grad():
            action = agent(torch.from_numpy(seen_now))[0].sample().numpy()
        seen.append(seen_now)
        seen_now, reward, done = mazes.step(action)
        actions.append(action)
        rewards.append(reward)
        dones.append(done)
    with torch.no_grad():
        ahead = agent(torch.from_numpy(seen_now))[1].numpy()
    returns = np.zeros((16, mazes.n), dtype=np.float32)
    for t in reversed(range(16)):
        ahead = rewards[t] + 0.97 * ahead * (1 - dones[t])
        returns[t] = ahead
    observations = torch.tensor(seen, dtype=torch.float32)
    policy, value = agent(observations)
    advantage = torch.from_numpy(returns) - value
    chosen = policy.log_prob(torch.from_numpy(np.stack(actions)))
    loss = -(chosen * advantage.detach()).mean() + 0.5 * advantage.square().mean() - 0.01 * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 20 == 0:
        print(update, f"loss {loss.item():.4f} reward {np.mean(rewards):.4f}")
print("last", loss.item())
