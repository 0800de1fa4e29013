# /// cell
# lesson = "05"
# because = "a batch of 8 small pictures leaves the GPU all but empty: launching takes longer than computing"
# steps = 120
# small = { CHANNELS = "4", SIDE = "4", COUNT = "1024" }
#
# [[recording]]
# name = "batch-8"
# causes = ["small_batch"]
# also = ["launch_bound", "memory_underused"]
#
# [[recording]]
# name = "batch-32"
# because = "a batch of 32 small pictures"
# edits = [["BATCH = 8", "BATCH = 32"]]
#
# [[recording]]
# name = "batch-64"
# because = "a batch of 64 small pictures"
# edits = [["BATCH = 8", "BATCH = 64"]]
#
# [[recording]]
# name = "batch-256"
# because = "a batch of 256 small pictures"
# edits = [["BATCH = 8", "BATCH = 256"]]
#
# [[recording]]
# name = "batch-1024"
# because = "a batch of 1024 small pictures"
# edits = [["BATCH = 8", "BATCH = 1024"]]
# ///
"""A network on small pictures that lie on the GPU already."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 128
SIDE = 32
COUNT = 4096
torch.manual_seed(0)
pictures = torch.randn(COUNT, 3, SIDE, SIDE, device=device)
labels = torch.randint(0, 10, (COUNT,), device=device)


def block(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
        nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
    )  # fmt: skip


net = nn.Sequential(
    block(3, CHANNELS), block(CHANNELS, 2 * CHANNELS), block(2 * CHANNELS, 4 * CHANNELS), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(4 * CHANNELS, 10),
).to(device, memory_format=torch.channels_last)  # fmt: skip
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

# %% the training cell
BATCH = 8
for _ in range(4000):
    chosen = torch.randint(0, COUNT, (BATCH,), device=device)
    x = pictures[chosen].to(memory_format=torch.channels_last)
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), labels[chosen])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
