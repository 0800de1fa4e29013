# /// cell
# cohort = "second"
# because = "The log-determinant of the covariance is got from its eigenvalues (forward and backward through a general eigendecomposition) at each step; a Cholesky factor, which serves for the solve, too, gives it many times faster."
# thread = "https://github.com/ldeecke/gmm-torch/pull/19"
# line = "logdet = torch.linalg.eigvals(K).real.log().sum()"
# callee = "torch.linalg.eigvals"
# faster = 4.11
# ///
import math

import torch
import torch.nn as nn

torch.manual_seed(0)


class GP(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(dims, dtype=torch.float64))
        self.log_signal = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.log_noise = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def covariance(self, x):
        z = x / self.log_scale.exp()
        sq = (z * z).sum(1)
        d2 = (sq[:, None] + sq[None, :] - 2 * z @ z.T).clamp(min=0)
        return self.log_signal.exp() * torch.exp(-0.5 * d2) + self.log_noise.exp() * torch.eye(len(x), dtype=x.dtype)

    def negative_evidence(self, x, y):
        K = self.covariance(x)
        logdet = torch.linalg.eigvals(K).real.log().sum()
        fit = y @ torch.linalg.solve(K, y)
        return 0.5 * (fit + logdet + len(y) * math.log(2 * math.pi)) / len(y)


x = torch.rand(250, 4, dtype=torch.float64) * 4
y = torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * torch.randn(250, dtype=torch.float64)
y = (y - y.mean()) / y.std()
gp = GP(4)
optimizer = torch.optim.Adam(gp.parameters(), lr=0.05)
# %% the training cell
for it in range(150):
    optimizer.zero_grad()
    loss = gp.negative_evidence(x, y)
    loss.backward()
    optimizer.step()
    if it % 30 == 0:
        print(it, f"{loss.item():.4f}", gp.log_scale.exp().tolist())
print("last", loss.item())
