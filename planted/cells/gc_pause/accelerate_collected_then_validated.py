# /// cell
# causes = ["gc_pause", "logging_or_eval"]
# because = "garbage is collected after each step, and 4096 rows are predicted every fourth"
# framework = "accelerate"
# batch = 128
# steps = 24
# warmup = 4
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "        gc.collect()\n"
# new = ""
#
# [[second_cure]]
# old = "VALIDATE_EVERY = 4"
# new = "VALIDATE_EVERY = 4000"
# ///
"""The garbage is collected after each step, and each fourth step is followed by a validation; Accelerate."""

import gc

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

index = {i: [i, str(i)] for i in range(2_000)}  # from item to document, for later
train, validation = (TensorDataset(torch.randn(n, 64), torch.randint(0, 5, (n,))) for n in (4096, 4096))
VALIDATE_EVERY = 4

# %% the training cell
accelerator = Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(64, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 5))
opt = torch.optim.SGD(net.parameters(), lr=0.01, foreach=True)
net, opt, loader = accelerator.prepare(net, opt, DataLoader(train, batch_size=128, shuffle=True))
check = accelerator.prepare(DataLoader(validation, batch_size=512))
step = 0
for epoch in range(8):
    for x, y in loader:
        opt.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(net(x), y))
        opt.step()
        gc.collect()
        step += 1
        if step % VALIDATE_EVERY == 0:
            with torch.no_grad():
                losses = [nn.functional.cross_entropy(net(vx), vy).item() for vx, vy in check]
            accelerator.print(sum(losses) / len(losses))
