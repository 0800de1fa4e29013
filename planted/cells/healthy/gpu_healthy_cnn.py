# /// cell
# causes = []
# because = "convolutions in bf16 take the step, and workers are ahead"
# gpu = true
# batch = 128
# steps = 20
# warmup = 20
# tries = { workers = "12", channels_last = "True" }
# cohort = "2026-11-21e"
# ///
"""A network of convolutions as it should be: channels last, bf16, workers, pinned memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

device = torch.device("cuda")


class Pictures(Dataset):
    def __init__(self):
        self.pixels = torch.randn(256, 3, 96, 96)

    def __len__(self):
        return 16_384

    def __getitem__(self, i):
        return self.pixels[i % 256], i % 10


def block(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


net = nn.Sequential(
    block(3, 64), block(64, 256), block(256, 256), block(256, 512, 2), block(512, 512), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(512, 10),
).to(device, memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)

# %% the training cell
loader = DataLoader(Pictures(), batch_size=128, shuffle=True, num_workers=8, pin_memory=True, persistent_workers=True)
fast = torch.compile(net)
for epoch in range(4):
    for x, y in loader:
        x = x.to(device, non_blocking=True, memory_format=torch.channels_last)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
