# /// cell
# lesson = "06"
# because = "full convolutions: most of the arithmetic, in large matrix products"
# steps = 100
# small = { CHANNELS = "8", BATCH = "2", SIDE = "6" }
#
# [[recording]]
# name = "depthwise-off"
#
# [[recording]]
# name = "depthwise-on"
# because = "depthwise-separable convolutions: an eighth of the arithmetic, and as much memory traffic"
# edits = [
#     [
#         "    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)",
#         '''
#     each = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
#     return nn.Sequential(each, nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False))''',
#     ],
# ]
# ///
"""A network of eight convolutions with as many channels as they are given."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 256
BATCH = 64
SIDE = 56


def convolution():
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)


torch.manual_seed(0)
layers = [m for _ in range(8) for m in (convolution(), nn.BatchNorm2d(CHANNELS), nn.ReLU())]
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 10))
net = net.to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
x = torch.randn(BATCH, CHANNELS, SIDE, SIDE, device=device).to(memory_format=torch.channels_last)
y = torch.randint(0, 10, (BATCH,), device=device)

# %% the training cell
for _ in range(1000):
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
