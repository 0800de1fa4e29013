# /// cell
# cohort = "third"
# because = "The marginal likelihood inverts the covariance with torch.inverse and factorizes it a second time for logdet, both general LU with a costly backward; one Cholesky factor gives the quadratic term and the determinant."
# thread = "https://github.com/pyro-ppl/pyro/pull/650"
# line = "nll = 0.5 * rides @ torch.inverse(K) @ rides + 0.5 * torch.logdet(K)"
# callee = "torch.inverse"
# faster = 1.6
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
n = 500
X = torch.rand(n, 4, dtype=torch.double) * torch.tensor([24.0, 7.0, 1.0, 1.0], dtype=torch.double)
rides = torch.sin(X[:, 0] / 24 * 6.283) + 0.3 * torch.cos(X[:, 1] / 7 * 6.283) + X[:, 2] * X[:, 3]
rides = rides + 0.1 * torch.randn(n, dtype=torch.double)
rides = (rides - rides.mean()) / rides.std()
X = (X - X.mean(0)) / X.std(0)


class Kernel(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.log_length = nn.Parameter(torch.zeros(dims, dtype=torch.double))
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.double))
        self.log_noise = nn.Parameter(torch.tensor(-2.0, dtype=torch.double))

    def forward(self, a):
        a = a / self.log_length.exp()
        sq = (a * a).sum(1)
        squared = (sq[:, None] + sq[None] - 2 * a @ a.T).clamp(min=0)
        return self.log_scale.exp() * torch.exp(-0.5 * squared) + self.log_noise.exp() * torch.eye(len(a)).double()


kernel = Kernel(4)
optimizer = torch.optim.Adam(kernel.parameters(), lr=0.05)

# %% the training cell
for step in range(150):
    K = kernel(X)
    nll = 0.5 * rides @ torch.inverse(K) @ rides + 0.5 * torch.logdet(K)
    optimizer.zero_grad()
    nll.backward()
    optimizer.step()
    if step % 25 == 0:
        print(step, f"nll {nll.item() / n:.4f} noise {kernel.log_noise.exp().item():.4f}")
print("last", nll.item())
