# /// cell
# causes = ["small_batch"]
# because = "two sequences of 32 tokens leave the GPU all but empty"
# also = ["launch_bound", "memory_underused"]
# framework = "accelerate"
# gpu = true
# batch = 2
# cured_batch = 64
# steps = 60
# warmup = 40
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "size = 2"
# new = "size = 64"
# ///
"""A transformer fed two short sequences at a time; Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(20_000, 32, 256), torch.randn(20_000, 1))
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, dropout=0.0)
body, head = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(256, 1)
model = nn.Sequential(body, head)
size = 2

# %% the training cell
accelerator = Accelerator(mixed_precision="bf16")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
loader = DataLoader(data, batch_size=size, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x).mean(1), y)
        accelerator.backward(loss)
        optimizer.step()
