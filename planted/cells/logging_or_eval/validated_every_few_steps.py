# /// cell
# causes = ["logging_or_eval"]
# because = "256 images are predicted after every fifth step of 32"
# batch = 32
# steps = 25
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "validate_every = 5"
# new = "validate_every = 500"
# ///
"""The whole validation set after every fifth step, to have a smooth curve."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def images(count):
    make = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 3, 24, 24, generator=make), torch.randint(0, 10, (count,), generator=make))


train_set, validation_set = images(2048), images(256)


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(64 * 12 * 12, 10)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


model = SmallNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
validate_every = 5
curve = []

# %% the training cell
train_loader = DataLoader(train_set, batch_size=32, shuffle=True)
validation_loader = DataLoader(validation_set, batch_size=32)

step = 0
for epoch in range(4):
    for x, y in train_loader:
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % validate_every == 0:
            model.eval()
            right = 0
            with torch.no_grad():
                for vx, vy in validation_loader:
                    right += (model(vx).argmax(1) == vy).sum().item()
            curve.append(right / len(validation_set))
