# /// cell
# causes = ["no_tf32"]
# because = "matrix products take the step, in 32 bits"
# also = ["no_mixed_precision"]
# gpu = true
# steps = 20
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "TF32 = False"
# new = "TF32 = True"
# ///
"""Large matrix products in 32 bits with PyTorch's defaults."""

import torch
from torch import nn

device = "cuda"
torch.manual_seed(0)
TF32 = False
torch.backends.cuda.matmul.allow_tf32 = TF32
model = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 4096)).to(
    device
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(4096, 4096, device=device)

# %% the training cell
for step in range(200):
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
