# /// cell
# causes = []
# because = "the LSTM's matrix products take the step"
# batch = 128
# steps = 10
# warmup = 3
# tries = { workers = "2", batch_size = "256" }
# cohort = "2026-11-21b"
# looked_at = true
# ///
"""A wide LSTM over sequences in memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sequences = TensorDataset(torch.randn(2048, 12, 64), torch.randn(2048, 1))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 256, batch_first=True)
        self.out = nn.Linear(256, 1)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

# %% the training cell
loader = DataLoader(sequences, batch_size=128, shuffle=True)
for epoch in range(5):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
