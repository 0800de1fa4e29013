# /// cell
# because = "torch.distributions validates its arguments by default: for each MultivariateNormal the covariances are tested for symmetry and factorised once more only to see that they are positive definite."
# thread = "https://github.com/Toni-SM/skrl/pull/233"
# line = "dist = MultivariateNormal(mean, covariance_matrix=cov)"
# callee = "torch.distributions.Distribution.__init__ (constraints.positive_definite.check)"
# faster = 1.39
# ///
import torch
import torch.nn as nn
from torch.distributions import MultivariateNormal

torch.manual_seed(0)
D = 12
inputs = torch.randn(20_000, 20)
outputs = inputs[:, :D] + 0.3 * torch.randn(20_000, D) * inputs[:, 8:9].abs()


class CovarianceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.mean, self.factor = nn.Linear(64, D), nn.Linear(64, D * D)

    def forward(self, x):
        h = self.body(x)
        f = 0.1 * self.factor(h).view(-1, D, D)
        return self.mean(h), f @ f.transpose(1, 2) + 0.1 * torch.eye(D)


net = CovarianceNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
# %% the training cell
for step in range(400):
    idx = torch.randint(20_000, (256,))
    mean, cov = net(inputs[idx])
    dist = MultivariateNormal(mean, covariance_matrix=cov)
    loss = -dist.log_prob(outputs[idx]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 80 == 0:
        print(step, loss.item())
