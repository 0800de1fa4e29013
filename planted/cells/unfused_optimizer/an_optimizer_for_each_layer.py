# /// cell
# causes = ["unfused_optimizer"]
# because = "each of 100 layers has an Adam of its own, which updates its two small tensors one after the other"
# batch = 64
# profiled = 80
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
# optimizers = [
#     torch.optim.Adam(layer.parameters(), lr=base_lr * lr_decay ** (depth - 1 - i), amsgrad=True)
#     for i, layer in enumerate(layers)
# ]
# '''
# new = '''
# groups = [
#     {"params": list(la.parameters()), "lr": base_lr * lr_decay ** (depth - 1 - i)} for i, la in enumerate(layers)
# ]
# optimizers = [torch.optim.Adam(groups, amsgrad=True, fused=True)]
# '''
# ///
# Deep Equilibrium-ish toy: does layer-wise lr decay help plain very deep tanh nets? (see discussion w/ K. on Monday)
import torch
import torch.nn as nn

torch.manual_seed(150)
depth = 100
width = 24
base_lr = 2e-4
lr_decay = 0.99

# two spirals in 24 dimensions
m = 6400
r = torch.rand(m) * 3
cls = torch.randint(0, 2, (m,))
spiral = torch.stack([r * torch.cos(3 * r + torch.pi * cls), r * torch.sin(3 * r + torch.pi * cls)], 1)
basis = torch.linalg.qr(torch.randn(width, width)).Q
data = spiral @ basis[:2] + 0.05 * torch.randn(m, width)

layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
for layer in layers:
    nn.init.orthogonal_(layer.weight, gain=1.05)
    nn.init.zeros_(layer.bias)
readout = torch.randn(width, 2) / width**0.5  # fixed


def forward(x):
    for layer in layers:
        x = torch.tanh(layer(x))
    return x @ readout


# %% the training cell
optimizers = [
    torch.optim.Adam(layer.parameters(), lr=base_lr * lr_decay ** (depth - 1 - i), amsgrad=True)
    for i, layer in enumerate(layers)
]
losses = []
for t in range(200):
    batch = torch.randint(0, m, (64,))
    loss = nn.functional.cross_entropy(forward(data[batch]), cls[batch])
    for o in optimizers:
        o.zero_grad()
    loss.backward()
    for o in optimizers:
        o.step()
    losses.append(loss.item())
    if t % 50 == 49:
        print(t + 1, sum(losses[-50:]) / 50)
