# /// cell
# causes = ["unfused_optimizer"]
# because = "Lion, written in Python, goes through 480 small tensors one by one with eight operations each"
# batch = 32
# profiled = 80
# cohort = "2026-11-23"
#
# [[cure]]
# old = '''
#             for p in group["params"]:
#                 self._update(p, group)
# '''
# new = '''
#             self._update_all(group)
# '''
# ///
"""Inflow of 120 reservoirs, one small net per reservoir, all trained jointly (shared storms). Lion from the paper's
pseudo code, because pip is blocked on this machine."""

import torch
import torch.nn as nn
from torch.optim import Optimizer


class Lion(Optimizer):
    r"""https://arxiv.org/abs/2302.06675"""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        if not lr > 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, group)
        return loss

    def _update(self, p, group):
        if p.grad is None:
            return
        grad, state = p.grad, self.state[p]
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        exp_avg = state["exp_avg"]
        # decoupled weight decay
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        # update = sign(interpolation of gradient and its average)
        update = exp_avg.clone().mul_(beta1).add(grad, alpha=1 - beta1).sign_()
        p.add_(update, alpha=-group["lr"])
        # decay the average with the other beta
        exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)

    def _update_all(self, group):
        """the same on one flat vector; needs every gradient, so not for partly frozen nets"""
        params, (beta1, beta2) = group["params"], group["betas"]
        if "flat" not in group:
            group["flat"] = nn.utils.parameters_to_vector(params).detach().clone()
            group["average"] = torch.zeros_like(group["flat"])
            offset = 0
            for p in params:
                p.data = group["flat"][offset : offset + p.numel()].view_as(p)
                offset += p.numel()
        grad = torch.cat([p.grad.flatten() for p in params])
        group["flat"].mul_(1 - group["lr"] * group["weight_decay"])
        group["flat"].add_(torch.lerp(grad, group["average"], beta1).sign_(), alpha=-group["lr"])
        group["average"].lerp_(grad, 1 - beta2)


class ReservoirNets(nn.Module):
    def __init__(self, n=120, inputs=8, hidden=16):
        super().__init__()
        self.w1 = nn.ParameterList([nn.Parameter(torch.randn(inputs, hidden) / inputs**0.5) for _ in range(n)])
        self.b1 = nn.ParameterList([nn.Parameter(torch.zeros(hidden)) for _ in range(n)])
        self.w2 = nn.ParameterList([nn.Parameter(torch.randn(hidden, 1) / hidden**0.5) for _ in range(n)])
        self.b2 = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(n)])

    def forward(self, x):  # x: reservoir, batch, inputs
        h = torch.tanh(torch.baddbmm(torch.stack(tuple(self.b1)).unsqueeze(1), x, torch.stack(tuple(self.w1))))
        return torch.baddbmm(torch.stack(tuple(self.b2)).unsqueeze(1), h, torch.stack(tuple(self.w2))).squeeze(2)


torch.manual_seed(40)
N_SAMPLES = 1600
forecast = torch.randn(120, N_SAMPLES, 8)
inflow = torch.relu(forecast[..., :4].sum(-1) + 0.5 * torch.randn(120, 1)) + 0.1 * torch.randn(120, N_SAMPLES)

# %% the training cell
net = ReservoirNets()
opt = Lion(net.parameters(), lr=3e-4, weight_decay=0.01)
for epoch in range(4):
    total = 0.0
    for idx in torch.randperm(N_SAMPLES).split(32):
        loss = nn.functional.mse_loss(net(forecast[:, idx]), inflow[:, idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch}  mse {total * 32 / N_SAMPLES:.4f}")
