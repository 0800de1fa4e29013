# /// cell
# knob = "batch_size"
# value = 2048
# truth = "slower"
# because = "a contrastive loss compares each sample with all others: its work per sample grows with the batch"
# steps = 5
# pairs = 8
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

encoder = nn.Linear(32, 32)
optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(16384, 32)), batch_size=256, shuffle=True, drop_last=True)

# %% the training cell
for epoch in range(1000):
    for x, in loader:
        one = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        two = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = F.cross_entropy(one @ two.T / 0.1, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
