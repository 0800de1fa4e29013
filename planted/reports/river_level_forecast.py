# /// cell
# cohort = "third"
# because = "healthy"
# ///
import numpy as np
import pandas as pd
import torch
import torch.nn as nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
hours = pd.date_range("2020-01-01", periods=9000, freq="h")
level = np.cumsum(rng.normal(0, 0.02, 9000)) + 0.5 * np.sin(np.arange(9000) / 24 * 2 * np.pi)
frame = pd.DataFrame(
    {"level": level, "rain": rng.gamma(0.3, 1.0, 9000), "hour": hours.hour / 23 - 0.5, "day": hours.dayofyear / 365 - 0.5},
    index=hours,
)
values = torch.from_numpy(((frame - frame.mean()) / frame.std()).to_numpy("float32"))
windows = values.unfold(0, 108, 1).transpose(1, 2)  # a view: window, hour, column


class Network(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        layers, inputs = [], 4
        for dilation in (1, 2, 4, 8):
            layers += [nn.Conv1d(inputs, channels, 5, padding=2 * dilation, dilation=dilation), nn.ReLU()]
            inputs = channels
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(channels * 96, 12)

    def forward(self, x):
        return self.head(self.body(x.transpose(1, 2)).flatten(1))


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.HuberLoss()

# %% the training cell
for step in range(120):
    batch = windows[torch.randint(len(windows), (128,))]
    loss = criterion(model(batch[:, :96]), batch[:, 96:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, f"{loss.item():.4f}")
print("last", loss.item())
