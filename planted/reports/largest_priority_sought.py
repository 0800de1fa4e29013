# /// cell
# because = "Each new experience gets the largest priority so far, found with max() over all stored priorities: O(n) on every step of the environment."
# thread = "https://github.com/UoA-CARES/cares_reinforcement_learning/pull/117"
# line = "highest = max(self.priorities) if self.priorities else 1.0"
# callee = "max (builtin)"
# faster = 1.85
# ///
import random
from collections import deque
import numpy as np
import torch
import torch.nn as nn

random.seed(0); np.random.seed(0); torch.manual_seed(0)
CAPACITY = 150_000


class PriorityMemory:
    def __init__(self, capacity):
        self.priorities = deque(maxlen=capacity)
        self.states = np.zeros((capacity, 8), np.float32)
        self.rewards = np.zeros(capacity, np.float32)
        self.actions = np.zeros(capacity, np.int64)
        self.head, self.capacity = 0, capacity

    def add(self, state, action, reward):
        highest = max(self.priorities) if self.priorities else 1.0
        self.priorities.append(highest)
        i = self.head % self.capacity
        self.states[i], self.actions[i], self.rewards[i] = state, action, reward
        self.head += 1

    def sample(self, n):
        idx = np.random.randint(0, min(self.head, self.capacity) - 1, n)
        return torch.from_numpy(self.states[idx]), torch.from_numpy(self.actions[idx]), torch.from_numpy(self.rewards[idx]), torch.from_numpy(self.states[idx + 1])


memory = PriorityMemory(CAPACITY)
memory.priorities.extend(np.random.rand(120_000).tolist())
memory.head = 120_000
memory.states[:120_000] = np.random.randn(120_000, 8)
q = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(q.parameters(), lr=5e-4)


class Drift:
    def __init__(self):
        self.s = np.zeros(8, np.float32)

    def step(self, a):
        self.s = 0.95 * self.s + 0.1 * np.random.randn(8).astype(np.float32)
        self.s[a] += 0.1
        return self.s, -float(np.abs(self.s).sum())


env = Drift()
# %% the training cell
state = env.s
for step in range(1500):
    if random.random() < 0.1:
        action = random.randrange(4)
    else:
        with torch.no_grad():
            action = int(q(torch.from_numpy(state)).argmax())
    state, reward = env.step(action)
    memory.add(state, action, reward)
    s, a, r, s2 = memory.sample(64)
    with torch.no_grad():
        target = r + 0.99 * q(s2).max(1).values
    loss = nn.functional.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 300 == 0:
        print(step, loss.item())
