# /// cell
# causes = ["worker_restart"]
# because = "a round of 8 steps of a few milliseconds, and each starts two processes anew"
# batch = 40
# steps = 64
# warmup = 8
# profiled = 100
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "num_workers=2"
# new = "num_workers=0"
# ///
"""A student learns from its teacher's soft labels; each short round draws its own part of the data."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

torch.manual_seed(21)
TEMPERATURE = 3.0
inputs = torch.randn(4000, 3, 16, 16)
teacher = nn.Sequential(nn.Flatten(), nn.Linear(768, 128), nn.Tanh(), nn.Linear(128, 20)).eval()
with torch.no_grad():
    soft = F.softmax(teacher(inputs) / TEMPERATURE, dim=-1)
everything = TensorDataset(inputs, soft)

student = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 20),
)
optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9, nesterov=True)


def loader_for(round_number, size=320):
    """This round's part of the data."""
    chosen = torch.randperm(len(everything), generator=torch.Generator().manual_seed(round_number))[:size]
    return DataLoader(Subset(everything, chosen.tolist()), batch_size=40, shuffle=True, num_workers=2)


# %% the training cell
for round_number in range(100):
    for x, target in loader_for(round_number):
        log_p = F.log_softmax(student(x) / TEMPERATURE, dim=-1)
        loss = F.kl_div(log_p, target, reduction="batchmean") * TEMPERATURE**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if round_number % 25 == 24:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
