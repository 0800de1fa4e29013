# /// cell
# because = "DataLoader over a TensorDataset held in memory fetches every row by itself and collates 256 tuples per batch; slicing whole batches out of the tensors is many times faster."
# thread = "https://github.com/pytorch/pytorch/issues/106704"
# line = "for xb, yb in loader:"
# callee = "torch.utils.data._utils.fetch / TensorDataset.__getitem__ / default_collate"
# faster = 2.21
# ///
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
n_rows, n_cols = 60_000, 24
features = torch.randn(n_rows, n_cols)
weights = torch.randn(n_cols)
price = (features @ weights + features[:, 0] * features[:, 1] + 0.1 * torch.randn(n_rows)).unsqueeze(1)

train_set = TensorDataset(features, price)
loader = DataLoader(train_set, batch_size=256, shuffle=True)

model = nn.Sequential(nn.Linear(n_cols, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()
# %% the training cell
for epoch in range(7):
    running = 0.0
    for xb, yb in loader:
        loss = loss_fn(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item() * len(xb)
    print(f"epoch {epoch}: mse {running / n_rows:.4f}")
