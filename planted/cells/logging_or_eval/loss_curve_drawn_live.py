# /// cell
# causes = ["logging_or_eval"]
# because = "after every tenth step matplotlib draws the loss so far and writes a picture"
# batch = 100
# steps = 30
# warmup = 10
# cohort = "2026-11-23"
#
# [[cure]]
# old = "if step % 10 == 0:"
# new = "if step % 1000 == 999:"
# ///
# Physics lab: learn the period of a real pendulum (large amplitude + damping) from its first second
# my first neural network!!

import math

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt
import torch

torch.manual_seed(981)

g = 9.81
dt = 0.01


def swing(length, phi0, damping, n=100):
    """leap frog, all pendulums at once"""
    phi = phi0.clone()
    omega = torch.zeros_like(phi)
    track = []
    for _ in range(n):
        omega = omega - dt * (g / length * torch.sin(phi) + damping * omega)
        phi = phi + dt * omega
        track.append(phi)
    return torch.stack(track, dim=1)


count = 5000
length = 0.2 + 1.8 * torch.rand(count)
phi0 = 0.2 + 2.0 * torch.rand(count)
damping = 0.3 * torch.rand(count)
X = swing(length, phi0, damping) + 0.01 * torch.randn(count, 100)
T = 2 * math.pi * torch.sqrt(length / g) * (1 + phi0**2 / 16 + 11 * phi0**4 / 3072)
T = T[:, None]

network = torch.nn.Sequential(
    torch.nn.Linear(100, 900),
    torch.nn.Tanh(),
    torch.nn.Linear(900, 900),
    torch.nn.Tanh(),
    torch.nn.Linear(900, 1),
)


def update_plot(losses, T_true, T_guess):
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.semilogy(losses)
    left.set_xlabel("step")
    left.set_ylabel("loss (s^2)")
    right.plot(T_true, T_guess, ".")
    right.plot([0, 4], [0, 4], "k--")
    right.set_xlabel("true T (s)")
    right.set_ylabel("predicted T (s)")
    fig.tight_layout()
    fig.savefig("training.png", dpi=80)
    plt.close(fig)


# %% the training cell
optimizer = torch.optim.Adam(network.parameters(), lr=3e-4, fused=True)
losses = []
step = 0
for epoch in range(4):
    order = torch.randperm(count)
    for i in range(0, count, 100):
        x = X[order[i : i + 100]]
        t = T[order[i : i + 100]]
        guess = network(x)
        loss = ((guess - t) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0:
            update_plot(losses, t[:, 0], guess[:, 0].detach())
        step += 1
