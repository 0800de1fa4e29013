# /// cell
# lesson = "09"
# because = "134 MB per step go to the GPU from pageable memory, and the CPU waits for each copy"
# steps = 60
# small = { SIDE = "4", BATCH = "4" }
# on_cpu = [[".pin_memory()", ""]]
#
# [[recording]]
# name = "copy-pageable"
# causes = ["blocking_copy"]
#
# [[recording]]
# name = "copy-pinned"
# because = "the same bytes from pinned memory, while the CPU goes on"
# edits = [
#     ["torch.randn(BATCH, 8, SIDE, SIDE, SIDE)", "torch.randn(BATCH, 8, SIDE, SIDE, SIDE).pin_memory()"],
#     [".to(device)\n    with", ".to(device, non_blocking=True)\n    with"],
# ]
# ///
"""Large volumes, kept in the memory of the CPU."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
SIDE = 64
BATCH = 16
torch.manual_seed(0)
volumes = [torch.randn(BATCH, 8, SIDE, SIDE, SIDE) for _ in range(8)]
y = torch.randint(0, 2, (BATCH,), device=device)
net = nn.Sequential(
    nn.Conv3d(8, 32, 3, padding=1, stride=2), nn.ReLU(), nn.Conv3d(32, 64, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 2),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

# %% the training cell
for step in range(400):
    x = volumes[step % 8].to(device)
    with torch.autocast(device, torch.bfloat16):
        loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
