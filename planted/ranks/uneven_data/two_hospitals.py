# /// cell
# cause = "uneven_data"
# because = "each rank trains on its own hospital in 20 steps per epoch: 512 patients a step in rank 0, 32 in rank 1"
# cohort = "2026-11-25a"
# written_ms = 113.6
# without_ms = 83.3
#
# [[without]]
# old = "PATIENTS = (10_240, 640)"
# new = "PATIENTS = (5_440, 5_440)"
# ///
"""Records of two hospitals, which may not leave their house; an epoch has as many steps in each of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

PATIENTS = (10_240, 640)
STEPS_PER_EPOCH = 20

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(320, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2)
)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

count = PATIENTS[rank]
torch.manual_seed(rank + 1)
records = torch.randn(count, 320)
readmitted = (records[:, :5].sum(1) > 0).long()
loader = DataLoader(
    TensorDataset(records, readmitted), batch_size=count // STEPS_PER_EPOCH, shuffle=True, drop_last=True
)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
