# /// cell
# causes = ["worker_restart", "logging_or_eval"]
# because = "two processes start for each six batches, then six histograms are logged every fourth step"
# batch = 32
# steps = 48
# warmup = 6
# profiled = 100
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "num_workers=2)"
# new = "num_workers=2, persistent_workers=True)"
#
# [[second_cure]]
# old = "LOG_EVERY = 4"
# new = "LOG_EVERY = 4000"
# ///
"""Workers start anew for six batches, and a histogram of each layer is logged every fourth step."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(192, 64), torch.randn(192, 1))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
LOG_EVERY = 4

# %% the training cell
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
step = 0
with open("histograms.jsonl", "w") as log:
    for epoch in range(100):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % LOG_EVERY == 0:
                for name, p in model.named_parameters():
                    counts = torch.histc(p.detach(), 100).tolist()
                    spread = torch.quantile(p.detach().flatten()[:100_000], torch.linspace(0, 1, 11)).tolist()
                    log.write(json.dumps({"step": step, "name": name, "counts": counts, "spread": spread}) + "\n")
            step += 1
