# /// cell
# causes = ["layout"]
# because = "each norm copies its input twice, to bring the channels to the end and back"
# batch = 8
# steps = 12
# warmup = 3
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "        x = x.permute(0, 2, 3, 1).contiguous()\n"
# new = "        x = x.permute(0, 2, 3, 1)\n"
#
# [[cure]]
# old = "        return x.permute(0, 3, 1, 2).contiguous()\n"
# new = "        return x.permute(0, 3, 1, 2)\n"
#
# [[cure]]
# old = "data = TensorDataset("
# new = '''
# net = net.to(memory_format=torch.channels_last)
# data = TensorDataset('''
# ///
"""Every layer brings the channels to the end, for a norm, and back again."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ChannelNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x):
        x = x.permute(0, 2, 3, 1).contiguous()
        x = self.norm(x)
        return x.permute(0, 3, 1, 2).contiguous()


class Mixer(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.before, self.after = ChannelNorm(channels), ChannelNorm(channels)
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x):
        return x + self.after(self.depthwise(self.before(x)))


torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(3, 48, 1), *(Mixer(48) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)
)
data = TensorDataset(torch.randn(256, 3, 48, 48), torch.randint(0, 10, (256,)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=True)

# %% the training cell
loader = DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(6):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
