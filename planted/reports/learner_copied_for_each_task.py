# /// cell
# because = "For each task the whole model is deep-copied before the inner step; functional weights (or a shallow clone) avoid it."
# thread = "https://github.com/learnables/learn2learn/pull/127"
# line = "learner = copy.deepcopy(model)"
# callee = "copy.deepcopy"
# faster = 1.56
# ///
import copy
import torch
import torch.nn as nn

torch.manual_seed(0)


def block(i, o):
    return nn.Sequential(nn.Linear(i, o), nn.LayerNorm(o), nn.ReLU(), nn.Linear(o, o), nn.LayerNorm(o), nn.ReLU())


model = nn.Sequential(block(1, 48), block(48, 48), block(48, 48), block(48, 48), nn.Linear(48, 1))
meta_opt = torch.optim.Adam(model.parameters(), lr=1e-3)
INNER_LR = 0.01


def sine_task(n=20):
    a, p = torch.rand(1) * 4 + 0.1, torch.rand(1) * 3.14
    x = torch.rand(2 * n, 1) * 10 - 5
    y = a * torch.sin(x + p)
    return x[:n], y[:n], x[n:], y[n:]
# %% the training cell
for it in range(60):
    meta_opt.zero_grad()
    total = 0.0
    for _ in range(8):
        xs, ys, xq, yq = sine_task()
        learner = copy.deepcopy(model)
        loss = nn.functional.mse_loss(learner(xs), ys)
        grads = torch.autograd.grad(loss, list(learner.parameters()))
        with torch.no_grad():
            for p, g in zip(learner.parameters(), grads):
                p -= INNER_LR * g
        query = nn.functional.mse_loss(learner(xq), yq)
        grads = torch.autograd.grad(query, list(learner.parameters()))
        for p, g in zip(model.parameters(), grads):
            p.grad = g / 8 if p.grad is None else p.grad + g / 8
        total += query.item()
    meta_opt.step()
    if it % 20 == 0:
        print(it, total / 8)
