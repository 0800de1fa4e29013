# /// cell
# causes = []
# because = "saving and validating take a moment every 50th step"
# batch = 512
# steps = 8
# warmup = 2
# profiled = 70
# tries = { workers = "2", batch_size = "1024" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""An autoencoder that saves itself and looks at its validation loss once in a while, as it should."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

train, held_out = TensorDataset(torch.randn(5120, 400)), torch.randn(256, 400)
model = nn.Sequential(
    nn.Linear(400, 1024), nn.ReLU(), nn.Linear(1024, 32), nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 400)
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)

# %% the training cell
step = 0
for epoch in range(16):
    for (x,) in DataLoader(train, batch_size=512, shuffle=True):
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 50 == 0:
            with torch.no_grad():
                print(f"{step}: {loss.item():.3f}, held out {nn.functional.mse_loss(model(held_out), held_out):.3f}")
            torch.save(model.state_dict(), "autoencoder.pt")
