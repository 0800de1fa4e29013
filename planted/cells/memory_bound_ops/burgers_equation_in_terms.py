# /// cell
# causes = ["memory_bound_ops"]
# because = "the activation is written out as eleven cheap operations, each of which goes through all of memory again"
# batch = 4096
# steps = 10
# warmup = 2
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#     inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
#     e = torch.exp(-2.0 * inner.abs())
#     tanh = torch.sign(inner) * (1.0 - e) / (1.0 + e)
#     return 0.5 * x * (1.0 + tanh)
# '''
# new = '''
#     return torch.nn.functional.gelu(x, approximate="tanh")
# '''
# ///
"""
Operator surrogate for the viscous Burgers equation:  u_t + u u_x = nu u_xx
(u0 sampled at 16 sensors, x, t)  ->  u(x, t)
Activation: GELU as in the GPT-2 code, tanh made safe for half precision (overflowed on the old card).
"""

import math

import numpy as np
import torch

nx, nt, n_fields, nu = 64, 200, 40, 0.02
x_grid = np.linspace(0, 2 * np.pi, nx, endpoint=False)


def gelu(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    e = torch.exp(-2.0 * inner.abs())
    tanh = torch.sign(inner) * (1.0 - e) / (1.0 + e)
    return 0.5 * x * (1.0 + tanh)


def solve(u, dt=0.004):
    """explicit Euler, central differences. crude but ok for this nu"""
    dx = x_grid[1]
    out = []
    for _ in range(nt):
        left, right = np.roll(u, 1, -1), np.roll(u, -1, -1)
        u = u + dt * (-u * (right - left) / (2 * dx) + nu * (right - 2 * u + left) / dx**2)
        out.append(u)
    return np.stack(out, 1)


rng = np.random.default_rng(1948)
modes = rng.normal(size=(n_fields, 3, 2)) / np.arange(1, 4)[:, None]
u0 = sum(modes[:, k, :1] * np.sin((k + 1) * x_grid) + modes[:, k, 1:] * np.cos((k + 1) * x_grid) for k in range(3))
u = solve(u0)

f, t, ix = (a.ravel() for a in np.meshgrid(np.arange(n_fields), np.arange(nt), np.arange(nx), indexing="ij"))
inputs = np.concatenate([u0[f][:, ::4], x_grid[ix, None], t[:, None] / nt], 1)
inputs = torch.tensor(inputs, dtype=torch.float32)
outputs = torch.tensor(u.ravel()[:, None], dtype=torch.float32)


class Net(torch.nn.Module):
    def __init__(self, w=64):
        super().__init__()
        self.a = torch.nn.Linear(18, w)
        self.b = torch.nn.Linear(w, w)
        self.c = torch.nn.Linear(w, w)
        self.d = torch.nn.Linear(w, 1)

    def forward(self, z):
        z = gelu(self.a(z))
        z = z + gelu(self.b(z))
        z = z + gelu(self.c(z))
        return self.d(z)


torch.manual_seed(1948)
model = Net()

# %% the training cell
opt = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
hist = np.zeros(120)
for it in range(120):
    sel = torch.randint(0, len(inputs), (4096,))
    loss = ((model(inputs[sel]) - outputs[sel]) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    hist[it] = loss.item()
print("final mse", hist[-10:].mean())
