# /// cell
# knob = "cache"
# value = true
# truth = "slower"
# because = "the items are in memory already; with a collate_fn of the cell's own the cache must copy each of them"
# steps = 50
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

def together(items):
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.randn(8192, 1)), batch_size=64, collate_fn=together)

model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
