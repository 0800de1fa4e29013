# /// cell
# cohort = "second"
# because = "The replay memory is a deque of 600000 transitions; random.sample indexes it in the middle, which is O(n) for each element drawn; a list (ring buffer) has constant access."
# thread = "https://github.com/HorizonRobotics/SocialRobot/issues/5"
# line = "batch = random.sample(self.memory, self.batch_size)"
# callee = "random.sample"
# faster = 2.70
# ///
import random
from collections import deque

import numpy as np
import torch
import torch.nn as nn

random.seed(0)
torch.manual_seed(0)
rng = np.random.default_rng(0)


class Agent:
    def __init__(self, capacity=1_000_000, batch_size=256, gamma=0.98):
        self.memory = deque(maxlen=capacity)
        self.batch_size, self.gamma = batch_size, gamma
        self.q = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.target = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=5e-4)

    def remember(self, s, a, r, s2, done):
        self.memory.append((s, a, r, s2, done))

    @torch.no_grad()
    def act(self, s, eps):
        if rng.random() < eps:
            return int(rng.integers(4))
        return int(self.q(torch.from_numpy(s)).argmax())

    def learn(self):
        batch = random.sample(self.memory, self.batch_size)
        s, a, r, s2, done = (np.asarray(x) for x in zip(*batch))
        s, s2 = torch.from_numpy(s), torch.from_numpy(s2)
        a, r, done = torch.from_numpy(a), torch.from_numpy(r).float(), torch.from_numpy(done).float()
        with torch.no_grad():
            goal = r + self.gamma * (1 - done) * self.target(s2).max(1).values
        now = self.q(s).gather(1, a[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(now, goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def move(s, a):
    push = np.zeros(6, dtype=np.float32)
    push[a] = 0.1
    s2 = (0.98 * s + push + rng.standard_normal(6) * 0.02).astype(np.float32)
    return s2, float(1 - abs(s2).sum() / 6), bool(abs(s2).max() > 3)


agent = Agent()
states = rng.standard_normal((600_001, 6)).astype(np.float32)
actions = rng.integers(0, 4, 600_000)
for i in range(600_000):
    agent.remember(states[i], int(actions[i]), 0.5, states[i + 1], False)
# %% the training cell
state = np.zeros(6, dtype=np.float32)
for step in range(400):
    action = agent.act(state, eps=0.1)
    following, reward, done = move(state, action)
    agent.remember(state, action, reward, following, done)
    state = np.zeros(6, dtype=np.float32) if done else following
    loss = agent.learn()
    if step % 100 == 0:
        agent.target.load_state_dict(agent.q.state_dict())
        print(step, round(loss, 5))
print("last", loss)
