# /// cell
# cohort = "fourth"
# because = "healthy"
# ///
import math

import torch
import torch.nn as nn

torch.manual_seed(41)

WELLS = 1500
place = torch.rand(WELLS, 3)
level = (torch.sin(6 * place[:, 0]) + torch.cos(5 * place[:, 1]) * place[:, 2]
         + 0.1 * torch.randn(WELLS))
level = (level - level.mean()) / level.std()


class WellGP(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_length = nn.Parameter(torch.full((3,), -1.0))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.tensor(-1.0))

    def neg_log_likelihood(self, x, y):
        z = x / self.log_length.exp()
        sq = (z * z).sum(1)
        dist = (sq[:, None] + sq[None, :] - 2 * z @ z.T).clamp_min(0)
        k = self.log_scale.exp() * torch.exp(-0.5 * dist)
        k = k + (self.log_noise.exp() + 1e-3) * torch.eye(len(x))
        chol = torch.linalg.cholesky(k)
        half = torch.linalg.solve_triangular(chol, y[:, None], upper=False)
        return (0.5 * (half ** 2).sum() + chol.diagonal().log().sum()
                + 0.5 * len(x) * math.log(2 * math.pi)) / len(x)


model = WellGP()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

# %% the training cell
for step in range(120):
    optimizer.zero_grad()
    loss = model.neg_log_likelihood(place, level)
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} nll {loss.item():.4f} noise {model.log_noise.exp().item():.3f}")
