# /// cell
# because = "SciPy fits a Savitzky-Golay filter over each batch in the loop"
# callee = "scipy"
# ///
"""Stars by their spectra, which are smoothed in the loop, after the loader."""

import torch
from scipy.signal import savgol_filter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
spectra = TensorDataset(torch.randn(6_400, 1024), torch.randint(7, (6_400,)))
net = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 7))
optimizer = torch.optim.Adam(net.parameters())
# %% the training cell
loader = DataLoader(spectra, batch_size=64, shuffle=True)
for epoch in range(4):
    for x, kind in loader:
        smooth = torch.from_numpy(savgol_filter(x.numpy(), 61, 3)).float()  # HOT
        loss = nn.functional.cross_entropy(net(smooth), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
