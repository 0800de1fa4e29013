# /// cell
# lesson = "08"
# because = "a dozen cheap operations between two products, each of which goes through memory"
# steps = 100
# limit_s = 75
# small = { WIDTH = "32", ROWS = "32" }
# on_cpu = [["fast = torch.compile(model)", "fast = model"]]
#
# [[recording]]
# name = "compile-off"
# causes = ["memory_bound_ops"]
#
# [[recording]]
# name = "compile-on"
# because = "the compiler puts the cheap operations into one kernel"
# edits = [["fast = model", "fast = torch.compile(model)"]]
# ///
"""Layers with an activation of one's own, written in small operations."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 2048
ROWS = 16_384


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.linear(self.norm(x)).float()
        gate = torch.sigmoid(1.702 * h) * torch.cos(0.5 * h) + 0.1 * torch.sin(h)
        return x + gate * h + 0.01 * torch.tanh(h)


torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(4))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(ROWS, WIDTH, device=device)

# %% the training cell
fast = model
for _ in range(800):
    with torch.autocast(device, torch.bfloat16):
        loss = fast(x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
