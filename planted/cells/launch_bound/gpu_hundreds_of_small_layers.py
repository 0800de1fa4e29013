# /// cell
# causes = ["launch_bound"]
# because = "thousands of operations of a few microseconds each"
# also = ["small_batch"]
# gpu = true
# steps = 40
# warmup = 10
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "nn.functional.mse_loss(model(x), y)"
# new = "nn.functional.mse_loss(compiled(x), y)"
#
# [[cure]]
# old = "for step in"
# new = '''
# compiled = torch.compile(model, mode="reduce-overhead")
# for step in'''
# ///
"""Three hundred tiny layers: the CPU cannot start them as fast as the GPU is done with them."""

import torch
from torch import nn

device = torch.device("cuda")
torch.manual_seed(0)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


model = nn.Sequential(*(Tiny() for _ in range(300))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x, y = torch.randn(256, 64, device=device), torch.randn(256, 64, device=device)

# %% the training cell
for step in range(400):
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
