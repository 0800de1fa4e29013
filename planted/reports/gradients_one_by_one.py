# /// cell
# because = "Per-sample gradients (for clipping each) are got by one backward per sample in a loop; vmap over grad gives them in one pass."
# thread = "https://github.com/pytorch/pytorch/issues/7786"
# line = "grads = torch.autograd.grad(loss_fn(model(x[i:i + 1]), y[i:i + 1]), params)"
# callee = "torch.autograd.grad"
# faster = 5.67
# ///
import torch
import torch.nn as nn

torch.manual_seed(0)
records = torch.randn(10_000, 30)
labels = (records[:, 0] + records[:, 1] * records[:, 2] > 0).long()
model = nn.Sequential(nn.Linear(30, 100), nn.Tanh(), nn.Linear(100, 50), nn.Tanh(), nn.Linear(50, 2))
loss_fn = nn.CrossEntropyLoss()
params = list(model.parameters())
optimizer = torch.optim.SGD(params, lr=0.2)
CLIP, SIGMA, BATCH = 1.0, 0.6, 64
# %% the training cell
for step in range(100):
    idx = torch.randint(10_000, (BATCH,))
    x, y = records[idx], labels[idx]
    summed = [torch.zeros_like(p) for p in params]
    for i in range(BATCH):
        grads = torch.autograd.grad(loss_fn(model(x[i:i + 1]), y[i:i + 1]), params)
        norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        for s, g in zip(summed, grads):
            s += g * scale
    for p, s in zip(params, summed):
        p.grad = (s + SIGMA * CLIP * torch.randn_like(s)) / BATCH
    optimizer.step()
    if step % 20 == 0:
        print(step, loss_fn(model(x), y).item())
