# /// cell
# causes = ["small_batch"]
# because = "a step for 4 spectra costs nearly as much as one for 64"
# framework = "accelerate"
# batch = 4
# cured_batch = 64
# steps = 80
# warmup = 10
# profiled = 300
# cohort = "2026-11-21d"
# looked_at = true
#
# [[cure]]
# old = '"batch_size": 4,'
# new = '"batch_size": 64,'
# ///
"""Clay in the soil from its near-infrared spectrum, four spectra to a step, as the paper has it; Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(21)
bands = torch.linspace(0, 1, 256)
clay = torch.rand(4800, 1)
dips = torch.exp(-(((bands - 0.6) / 0.05) ** 2)) * clay + torch.exp(-(((bands - 0.3) / 0.1) ** 2)) * torch.rand(4800, 1)
spectra = (1 - 0.4 * dips + 0.02 * torch.randn(4800, 256)).unsqueeze(1)


class Inception(nn.Module):
    """Three widths of kernel side by side"""

    def __init__(self, c_in, c_out):
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv1d(c_in, c_out, k, stride=4, padding=k // 2) for k in (5, 9, 15))
        self.norm = nn.BatchNorm1d(3 * c_out)

    def forward(self, x):
        return torch.relu(self.norm(torch.cat([branch(x) for branch in self.branches], 1)))


def build():
    return nn.Sequential(
        Inception(1, 4),
        Inception(12, 8),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(24 * 16, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )


hyper = {"batch_size": 4, "lr": 2e-3, "clip": 1.0, "epochs": 2}

# %% the training cell
accelerator = Accelerator(cpu=True)
net = build()
optimizer = torch.optim.AdamW(net.parameters(), lr=hyper["lr"], fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5000)
train = DataLoader(TensorDataset(spectra, clay), batch_size=hyper["batch_size"], shuffle=True, drop_last=True)
net, optimizer, train, schedule = accelerator.prepare(net, optimizer, train, schedule)

net.train()
for epoch in range(hyper["epochs"]):
    running = torch.zeros(())
    for spectrum, share in train:
        loss = nn.functional.smooth_l1_loss(net(spectrum), share)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), hyper["clip"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        running += loss.detach()
    accelerator.print(f"epoch {epoch}: {running.item() / len(train):.4f}")
