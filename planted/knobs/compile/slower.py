# /// cell
# knob = "compile"
# value = "default"
# truth = "slower"
# because = "one product of 8 by 4 numbers: checking whether the compiled code still fits takes longer"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

model = nn.Linear(8, 1)
loader = DataLoader(TensorDataset(torch.randn(16384, 8), torch.randn(16384, 1)), batch_size=4)

optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
