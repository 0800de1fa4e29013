# /// cell
# knob = "fused_optimizer"
# value = false
# truth = "slower"
# because = "the same, where the cell as written has fused=True: taking it out brings the calls back"
# ///
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(60)), nn.Linear(16, 1))
loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.randn(8192, 1)), batch_size=32, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

# %% the training cell
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
