# /// cell
# lesson = "01"
# because = "large matrix products in bf16: NVML says 100 % here too, and all multiprocessors work"
# steps = 200
# small = { WIDTH = "64", ROWS = "32" }
#
# [[recording]]
# name = "utilization-full"
# ///
"""Large layers and a large batch in bf16."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 4096
ROWS = 8192
torch.manual_seed(0)
signal = torch.randn(ROWS, WIDTH, device=device)
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

# %% the training cell
for _ in range(2000):
    with torch.autocast(device, torch.bfloat16):
        loss = model(signal).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
