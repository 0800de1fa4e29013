# /// cell
# causes = ["layout"]
# because = "each block copies its input to have time last, and its output to have it in the middle again"
# batch = 16
# steps = 12
# warmup = 3
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = '''
#         y = x.transpose(1, 2).contiguous()
#         y = self.conv(y)
# '''
# new = "        y = self.conv(x)\n"
#
# [[cure]]
# old = "        y = y.transpose(1, 2).contiguous()\n"
# new = ""
#
# [[cure]]
# old = "        x = self.stem(x)\n"
# new = "        x = self.stem(x).transpose(1, 2).contiguous()\n"
#
# [[cure]]
# old = "x.mean(1)"
# new = "x.mean(2)"
# ///
"""Sleep stages from an EEG; around each convolution the features are brought from the end to the middle, and back."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(13)


class DepthwiseBlock(nn.Module):
    """Between the blocks a batch is (sample, time, feature), as it was with the recurrent network before."""

    def __init__(self, features):
        super().__init__()
        self.conv = nn.Conv1d(features, features, 3, padding=1, groups=features)

    def forward(self, x):
        y = x.transpose(1, 2).contiguous()
        y = self.conv(y)
        y = y.transpose(1, 2).contiguous()
        return torch.relu(x + y)


class SleepNet(nn.Module):
    def __init__(self, channels=6, features=32, depth=6, stages=5):
        super().__init__()
        self.stem = nn.Linear(channels, features)
        self.blocks = nn.Sequential(*(DepthwiseBlock(features) for _ in range(depth)))
        self.head = nn.Linear(features, stages)

    def forward(self, x):
        x = self.stem(x)
        x = self.blocks(x)
        return self.head(x.mean(1))


nights = TensorDataset(torch.randn(384, 1024, 6), torch.randint(0, 5, (384,)))
network = SleepNet()
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)

# %% the training cell
loader = DataLoader(nights, batch_size=16, shuffle=True)
for epoch in range(5):
    network.train()
    for signal, stage in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(signal), stage, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
    scheduler.step()
