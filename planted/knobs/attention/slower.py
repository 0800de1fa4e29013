# /// cell
# knob = "attention"
# value = "math"
# truth = "slower"
# because = "the 1024 by 1024 weights of each head have to go through memory"
# steps = 5
# pairs = 8
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 3 * 128)
        self.head = nn.Linear(128, 1)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 32)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v)
        return self.head(h.transpose(1, 2).flatten(2)).mean(1)

model = Attend()
loader = DataLoader(TensorDataset(torch.randn(64, 1024, 128), torch.randn(64, 1)), batch_size=1)

optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
