# /// cell
# because = "The Shampoo optimiser computes the inverse fourth roots of both preconditioners by eigendecomposition at every step (update_freq=1) instead of every 20th or so."
# thread = "https://github.com/kozistr/pytorch_optimizer/issues/100"
# line = "optimizer = Shampoo(net.parameters(), lr=0.05, update_freq=1)"
# callee = "torch.linalg.eigh"
# faster = 2.21
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)


def inverse_root(m, p=4):
    values, vectors = torch.linalg.eigh(m)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** (-1 / p)) @ vectors.t()


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, eps=1e-3, update_freq=1):
        super().__init__(params, dict(lr=lr, eps=eps, update_freq=update_freq))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g, s = p.grad, self.state[p]
                if g.ndim == 1:
                    p.sub_(g, alpha=group["lr"])
                    continue
                if not s:
                    s["n"], s["L"], s["R"] = 0, group["eps"] * torch.eye(g.shape[0]), group["eps"] * torch.eye(g.shape[1])
                s["L"] += g @ g.t()
                s["R"] += g.t() @ g
                if s["n"] % group["update_freq"] == 0:
                    s["iL"], s["iR"] = inverse_root(s["L"]), inverse_root(s["R"])
                s["n"] += 1
                p.sub_(s["iL"] @ g @ s["iR"], alpha=group["lr"])


patches = torch.randn(6000, 96)
target = torch.tanh(patches @ torch.randn(96, 64) / 10)
net = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
# %% the training cell
optimizer = Shampoo(net.parameters(), lr=0.05, update_freq=1)
for step in range(300):
    idx = torch.randint(6000, (512,))
    loss = nn.functional.mse_loss(net(patches[idx]), target[idx])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        print(step, loss.item())
