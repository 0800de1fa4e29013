# /// cell
# lesson = "08"
# because = "convolutions in bf16 with the channels first: cuDNN turns the numbers around for its kernels"
# steps = 100
# small = { CHANNELS = "8", BATCH = "2", SIDE = "16" }
#
# [[recording]]
# name = "channels-last-off"
#
# [[recording]]
# name = "channels-last-on"
# because = "the numbers lie as the kernels want them"
# edits = [
#     ["net = net.to(device)", "net = net.to(device, memory_format=torch.channels_last)"],
#     ["SIDE, device=device)", "SIDE, device=device).to(memory_format=torch.channels_last)"],
# ]
# ///
"""A network of convolutions in bf16."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 128
BATCH = 64
SIDE = 112


def block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
    )  # fmt: skip


torch.manual_seed(0)
blocks = [block(3, CHANNELS), block(CHANNELS, 2 * CHANNELS), block(2 * CHANNELS, 4 * CHANNELS)]
net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * CHANNELS, 10))
net = net.to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
x = torch.randn(BATCH, 3, SIDE, SIDE, device=device)
y = torch.randint(0, 10, (BATCH,), device=device)

# %% the training cell
for _ in range(1000):
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
