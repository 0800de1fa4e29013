# /// cell
# causes = ["recompilation"]
# because = "a string that the compiled loss reads is another one in each step"
# batch = 32
# steps = 8
# warmup = 2
# profiled = 30
# fresh = true
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = 'torch.compile(criterion, backend="aot_eager")'
# new = "criterion"
# ///
"""A compiled loss that takes its temperature as a Python number, another one in each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

teacher_logits = torch.randn(2048, 50)
data = TensorDataset(torch.randn(2048, 64), teacher_logits)
student = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 50))
optimizer = torch.optim.SGD(student.parameters(), lr=0.01)


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.schedule = "warm-0"

    def forward(self, student_logits, teacher_logits):
        t = 1.0 + 0.01 * int(self.schedule.split("-")[1])
        p = torch.softmax(teacher_logits / t, -1)
        return -(p * torch.log_softmax(student_logits / t, -1)).sum(-1).mean() * t * t


criterion = Distillation()

# %% the training cell
torch._dynamo.config.recompile_limit = 1000
fast_criterion = torch.compile(criterion, backend="aot_eager")
step = 0
for epoch in range(10):
    for x, teacher in DataLoader(data, batch_size=32, shuffle=True):
        criterion.schedule = f"warm-{step}"
        loss = fast_criterion(student(x), teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
