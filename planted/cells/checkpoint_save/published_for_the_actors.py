# /// cell
# causes = ["checkpoint_save"]
# because = "5 MB are written, and waited for on the disk, after each step"
# batch = 64
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "PUBLISH_EVERY = 1"
# new = "PUBLISH_EVERY = 1000"
# ///
"""A Q-network; after each update the learner publishes it in a file for the actors that play the game."""

import copy
import os

import torch
from torch import nn

torch.manual_seed(6)
STATE, ACTIONS, GAMMA = 32, 6, 0.98


class Dueling(nn.Module):
    def __init__(self, width=640):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.advantage = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ACTIONS))

    def forward(self, state):
        h = self.body(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(-1, keepdim=True)


class Replay:
    """Transitions, in tensors."""

    def __init__(self, size=20_000):
        self.state, self.following = torch.randn(size, STATE), torch.randn(size, STATE)
        self.action, self.reward = torch.randint(ACTIONS, (size, 1)), torch.randn(size)

    def sample(self, count):
        i = torch.randint(len(self.state), (count,))
        return self.state[i], self.action[i], self.reward[i], self.following[i]


def publish(network, version, path="policy.pt"):
    """Written beside, then renamed: an actor never reads half a file."""
    with open(path + ".new", "wb") as file:
        torch.save({"version": version, "network": network.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


replay = Replay()
online = Dueling()
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=3e-4, fused=True)
PUBLISH_EVERY = 1

# %% the training cell
for update in range(1, 201):
    state, action, reward, following = replay.sample(64)
    with torch.no_grad():
        best = online(following).argmax(-1, keepdim=True)
        goal = reward + GAMMA * target(following).gather(1, best).squeeze(1)
    q = online(state).gather(1, action).squeeze(1)
    loss = nn.functional.smooth_l1_loss(q, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % PUBLISH_EVERY == 0:
        publish(online, update)
    if update % 100 == 0:
        target.load_state_dict(online.state_dict())
