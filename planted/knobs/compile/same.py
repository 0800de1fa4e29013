# /// cell
# knob = "compile"
# value = "default"
# truth = "no measurable difference"
# because = "a large matrix product and its gradient, by the same library with and without the compiler"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

model = nn.Linear(1024, 1024, bias=False)
loader = DataLoader(TensorDataset(torch.randn(4096, 1024), torch.randn(4096, 1024)), batch_size=512)

optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
