# /// cell
# causes = ["small_batch"]
# because = "three dives per step, whose 120 seconds are gone through one by one however many dives there are"
# batch = 3
# cured_batch = 32
# cohort = "2026-11-22b"
# looked_at = true
#
# [[cure]]
# old = "batch=3"
# new = "batch=32"
# ///
"""What a seal does on a dive (feeds, rests, travels) from what its tag records: a GRU over two minutes."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(78)
args = SimpleNamespace(epochs=3, batch=3, hidden=96, layers=2, lr=1e-3, seconds=120)


class Dives(Dataset):
    """Depth, pitch and the roughness of the movement, once per second."""

    def __init__(self, count, seconds):
        self.kind = torch.randint(0, 4, (count,))
        time = torch.linspace(0, torch.pi, seconds)
        depth = torch.sin(time)[None] * (1 + self.kind[:, None])
        pitch = torch.cos(time)[None] * torch.rand(count, 1)
        rough = torch.rand(count, seconds) * (1 + (self.kind[:, None] == 1))
        self.tag = torch.stack([depth, pitch, rough], dim=-1) + 0.1 * torch.randn(count, seconds, 3)

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, dive):
        return self.tag[dive], self.kind[dive]


class DiveNet(nn.Module):
    def __init__(self, hidden, layers):
        super().__init__()
        self.gru = nn.GRU(3, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, 4)

    def forward(self, tag):
        states, _ = self.gru(tag)
        return self.head(states.mean(1))


dives = Dives(2304, args.seconds)

# %% the training cell
net = DiveNet(args.hidden, args.layers)
optimizer = torch.optim.Adam(net.parameters(), lr=args.lr, fused=True)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(dives, batch_size=args.batch, shuffle=True)
for epoch in range(args.epochs):
    total = 0.0
    for tag, kind in loader:
        optimizer.zero_grad()
        loss = criterion(net(tag), kind)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
        total += float(loss.detach()) * len(kind)
    print(f"epoch {epoch}: {total / len(dives):.3f}")
