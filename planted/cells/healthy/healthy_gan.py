# /// cell
# causes = []
# because = "matrix products of both networks take the step"
# batch = 320
# steps = 6
# warmup = 2
# tries = { workers = "2", fused_optimizer = "True", batch_size = "640" }
# cohort = "2026-11-21a"
# looked_at = true
# ///
"""A GAN of wide layers with a batch that fills them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
real_data = TensorDataset(torch.randn(6400, 128))
G = nn.Sequential(nn.Linear(64, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 128))
D = nn.Sequential(nn.Linear(128, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 1))
opt_g = torch.optim.SGD(G.parameters(), lr=1e-3, foreach=True)
opt_d = torch.optim.SGD(D.parameters(), lr=1e-3, foreach=True)
score = nn.BCEWithLogitsLoss()

# %% the training cell
for epoch in range(10):
    for (real,) in DataLoader(real_data, batch_size=320, shuffle=True):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = G(torch.randn(len(real), 64))
        opt_d.zero_grad()
        (score(D(real), ones) + score(D(fake.detach()), zeros)).backward()
        opt_d.step()
        opt_g.zero_grad()
        score(D(fake), ones).backward()
        opt_g.step()
