# /// cell
# cohort = "fourth"
# because = "healthy"
# faster = 1.0
# ///
import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(0)
rng = np.random.default_rng(6)
rivers, days, window, batch_size = 40, 1500, 60, 512

season = np.sin(np.arange(days) * 2 * np.pi / 365)
rain = rng.gamma(0.4, 5.0, (rivers, days)) * (1.2 + season)
level = np.zeros((rivers, days))
memory = rng.uniform(0.9, 0.98, rivers)
for day in range(1, days):
    level[:, day] = memory * level[:, day - 1] + 0.1 * rain[:, day - 1]
series = np.stack([level, rain, np.broadcast_to(season, level.shape)], axis=2).astype(np.float32)
series = (series - series.mean((0, 1))) / series.std((0, 1))
series = torch.from_numpy(series)
windows = series.unfold(1, window + 1, 2).permute(0, 1, 3, 2).reshape(-1, window + 1, 3).contiguous()


class LevelForecaster(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.rnn = nn.GRU(3, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out).squeeze(2)


model = LevelForecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.MSELoss()

# %% the training cell
for epoch in range(2):
    order = torch.randperm(len(windows))
    for step, chosen in enumerate(order.split(batch_size)):
        batch = windows[chosen]
        loss = criterion(model(batch[:, :-1]), batch[:, 1:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 14 == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.5f}")
