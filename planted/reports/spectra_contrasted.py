# /// cell
# because = "healthy"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
encoder = nn.Sequential(nn.Conv1d(1, 32, 9, 2, 4), nn.ReLU(), nn.Conv1d(32, 64, 9, 2, 4), nn.ReLU(), nn.Conv1d(64, 128, 9, 2, 4), nn.ReLU(),
                        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(512, 128))
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
spectra = torch.randn(3000, 1, 256).cumsum(2) / 16
labels = torch.arange(64)
# %% the training cell
for step in range(50):
    x = spectra[torch.randint(3000, (64,))]
    both = torch.cat([x + 0.1 * torch.randn_like(x), x * (1 + 0.1 * torch.randn(64, 1, 1))])
    z1, z2 = F.normalize(encoder(both), dim=1).chunk(2)
    loss = F.cross_entropy(z1 @ z2.t() / 0.1, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
