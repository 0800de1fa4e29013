# /// cell
# causes = []
# because = "a step is convolutions, and a batch is there within a hundredth of it"
# batch = 32
# steps = 20
# warmup = 4
# tries = { workers = "2", batch_size = "64" }
# cohort = "2026-11-22b"
# ///
"""Kinds of clouds from photographs of the sky: a small convolutional net, trained as in the book."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(70)
KINDS = 7


def block(fan_in, fan_out, stride):
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(fan_out),
        nn.ReLU(inplace=True),
    )


def cloud_net():
    return nn.Sequential(
        block(3, 32, 1),
        block(32, 64, 2),
        block(64, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, KINDS),
    )


kinds = torch.randint(0, KINDS, (3584,))
skies = torch.rand(3584, 3, 48, 48).mul_(0.5).add_(kinds.view(-1, 1, 1, 1) / 14)
sky = TensorDataset(skies, kinds)

# %% the training cell
net = cloud_net().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
loader = DataLoader(sky, batch_size=32, shuffle=True, drop_last=True)
for epoch in range(3):
    total = torch.zeros(())
    for photograph, kind in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(net(photograph.to(memory_format=torch.channels_last)), kind)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    schedule.step()
    print(f"{epoch + 1}: {total.item() / len(loader):.3f}")
