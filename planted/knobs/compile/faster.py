# /// cell
# knob = "compile"
# value = "default"
# truth = "faster"
# because = "fourteen cheap operations on half a million numbers: compiled they go through memory once"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.frequency = nn.Parameter(torch.rand(64))
        self.shift = nn.Parameter(torch.rand(64))

    def forward(self, x):
        h = x.unsqueeze(-1) * self.frequency + self.shift
        for _ in range(4):
            h = (0.9 * h + 0.1).clamp(-3, 3)
        return h.mean(-1).mean(1, keepdim=True)

model = Waves()
loader = DataLoader(TensorDataset(torch.randn(1024, 256), torch.randn(1024, 1)), batch_size=32)

optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
