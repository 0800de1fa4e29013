# /// cell
# causes = ["slow_collate"]
# because = "the frames of 64 transitions become lists of numbers, and these a tensor"
# batch = 64
# steps = 40
# warmup = 10
# cohort = "2026-11-21d"
#
# [[cure]]
# old = "collate_fn=to_batch)"
# new = "collate_fn=to_batch_stacked)"
# ///
"""Double DQN on frames from a replay memory; its transitions become a batch in a function copied from a tutorial."""

import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

random.seed(5)
torch.manual_seed(5)
Transition = namedtuple("Transition", ("state", "action", "reward", "next_state", "done"))
GAMMA, TAU, ACTIONS = 0.99, 0.01, 4


class ReplayMemory(Dataset):
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, i):
        return self.memory[i]


def play(memory, frames):
    """Catch: a ball falls, the paddle moves at random."""
    screen = np.zeros((3, 20, 20), dtype=np.float32)
    ball, paddle = [0, random.randrange(20)], 10
    for _ in range(frames):
        action = random.randrange(ACTIONS)
        paddle = min(18, max(1, paddle + (0, -1, 1, 2)[action]))
        ball[0] += 1
        done = ball[0] == 19
        reward = float(abs(ball[1] - paddle) < 2) if done else 0.0
        frame = np.zeros((1, 20, 20), dtype=np.float32)
        frame[0, ball[0], ball[1]] = frame[0, 19, paddle - 1 : paddle + 2] = 1
        following = np.concatenate([screen[1:], frame])
        memory.push(screen, action, reward, following, done)
        screen = following
        if done:
            ball = [0, random.randrange(20)]


def to_batch(transitions):
    batch = Transition(*zip(*transitions, strict=True))
    return Transition(
        torch.tensor([s.tolist() for s in batch.state]),
        torch.tensor(batch.action),
        torch.tensor(batch.reward),
        torch.tensor([s.tolist() for s in batch.next_state]),
        torch.tensor(batch.done),
    )


def to_batch_stacked(transitions):
    batch = Transition(*zip(*transitions, strict=True))
    return Transition(
        torch.from_numpy(np.stack(batch.state)),
        torch.tensor(batch.action),
        torch.tensor(batch.reward),
        torch.from_numpy(np.stack(batch.next_state)),
        torch.tensor(batch.done),
    )


def q_network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 128), nn.ReLU(), nn.Linear(128, ACTIONS),
    )  # fmt: skip


memory = ReplayMemory(2000)
play(memory, 2000)
policy_net, target_net = q_network(), q_network()
target_net.load_state_dict(policy_net.state_dict())
target_net.requires_grad_(False)
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-4, amsgrad=True, fused=True)


def td_loss(batch):
    q = policy_net(batch.state).gather(1, batch.action[:, None]).squeeze(1)
    with torch.no_grad():
        best = policy_net(batch.next_state).argmax(1, keepdim=True)
        future = target_net(batch.next_state).gather(1, best).squeeze(1)
    return F.smooth_l1_loss(q, batch.reward + GAMMA * future * ~batch.done)


# %% the training cell
sampler = RandomSampler(memory, replacement=True, num_samples=200 * 64)
replay = DataLoader(memory, batch_size=64, sampler=sampler, collate_fn=to_batch)
for batch in replay:
    loss = td_loss(batch)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target_net.parameters(), policy_net.parameters(), strict=True):
            slow.lerp_(fast, TAU)
