# /// cell
# because = "a replay buffer in Python draws by priority, one by one"
# callee = "ReplayBuffer.sample"
# own = "replay_buffer"
# ///
"""Q-learning from a buffer of memories; the buffer is a file beside the notebook."""

import random

import torch
from replay_buffer import ReplayBuffer
from torch import nn

torch.manual_seed(11)
random.seed(11)
buffer = ReplayBuffer(20_000)
for i in range(20_000):
    buffer.add([random.random() for _ in range(8)], i % 4, random.random(), i % 97 + 1)
net = nn.Sequential(nn.Linear(8, 320), nn.ReLU(), nn.Linear(320, 320), nn.ReLU(), nn.Linear(320, 4))
optimizer = torch.optim.Adam(net.parameters())
# %% the training cell
for step in range(700):
    states, actions, rewards = buffer.sample(128)  # HOT
    q = net(torch.tensor(states)).gather(1, torch.tensor(actions)[:, None])
    loss = nn.functional.smooth_l1_loss(q[:, 0], torch.tensor(rewards))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
