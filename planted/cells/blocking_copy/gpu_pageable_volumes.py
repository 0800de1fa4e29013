# /// cell
# causes = ["blocking_copy"]
# because = "134 MB per step go to the GPU from pageable memory"
# also = ["data_starved"]
# gpu = true
# batch = 16
# warmup = 40
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "num_workers=8"
# new = "num_workers=8, pin_memory=True"
#
# [[cure]]
# old = "x.to(device), y.to(device)"
# new = "x.to(device, non_blocking=True), y.to(device, non_blocking=True)"
# ///
"""Large volumes go to the GPU from ordinary memory, and the CPU waits for each."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda"
volumes = TensorDataset(torch.randn(128, 8, 64, 64, 64), torch.randint(0, 2, (128,)))
net = nn.Sequential(
    nn.Conv3d(8, 8, 3, stride=4, padding=1), nn.ReLU(), nn.Conv3d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(16 * 8**3, 2),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

# %% the training cell
loader = DataLoader(volumes, batch_size=16, shuffle=True, num_workers=8, prefetch_factor=4, persistent_workers=True)
for epoch in range(20):
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
