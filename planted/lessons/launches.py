# /// cell
# lesson = "09"
# because = "hundreds of operations of a few microseconds each: the CPU cannot start them as fast as they end"
# steps = 100
# small = { LAYERS = "6" }
# on_cpu = [["model = torch.cuda.make_graphed_callables(model, (x,))\n", ""]]
#
# [[recording]]
# name = "launch-small-operators"
# causes = ["launch_bound"]
# also = ["small_batch"]
#
# [[recording]]
# name = "launch-cuda-graph"
# because = "the model's operations are recorded once, and started by one call"
# edits = [
#     [
#         "optimizer = torch.optim",
#         "model = torch.cuda.make_graphed_callables(model, (x,))\noptimizer = torch.optim",
#     ],
# ]
# ///
"""Many tiny layers."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = 100


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


torch.manual_seed(0)
model = nn.Sequential(*(Tiny() for _ in range(LAYERS))).to(device)
x, y = torch.randn(256, 64, device=device), torch.randn(256, 64, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

# %% the training cell
for _ in range(2000):
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
