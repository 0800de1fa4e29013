# /// cell
# knob = "accumulate"
# value = 4
# truth = "faster"
# because = "AdamW goes through a table of 3.2 million weights a dozen times, and now every fourth step only"
# steps = 12
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50_000, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.table(x).mean(1))

model = Bag()
words = torch.randint(50_000, (8192, 16))
loader = DataLoader(TensorDataset(words, torch.randn(8192, 1)), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
