# /// cell
# causes = ["logging_or_eval"]
# because = "six figures of each of 22 gradients are sorted out, written and flushed after each step"
# batch = 128
# steps = 40
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "    for name, parameter in model.named_parameters():"
# new = "    for name, parameter in []:"
# ///
"""A line of JSON for each parameter and step, flushed at once so that nothing gets lost."""

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
layers = [layer for _ in range(10) for layer in (nn.Linear(64, 64), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
loader = DataLoader(TensorDataset(torch.randn(8192, 64), torch.randn(8192, 1)), batch_size=128, shuffle=True)


def statistics(tensor):
    values = tensor.detach().flatten()
    return {
        "norm": values.norm().item(),
        "mean": values.mean().item(),
        "largest": values.abs().max().item(),
        "quantiles": torch.quantile(values, torch.tensor([0.05, 0.5, 0.95])).tolist(),
    }


# %% the training cell
with open("gradients.jsonl", "w") as log:
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for name, parameter in model.named_parameters():
                log.write(json.dumps({"name": name, **statistics(parameter.grad)}) + "\n")
                log.flush()
