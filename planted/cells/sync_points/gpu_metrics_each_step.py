# /// cell
# causes = ["sync_points"]
# because = "28 figures are brought to the CPU in each step, and each waits for the GPU"
# also = ["logging_or_eval", "launch_bound"]
# gpu = true
# batch = 256
# steps = 60
# warmup = 10
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "        watched(loss, logits, y)\n"
# new = ""
# ///
"""Loss, accuracy and the norm of each gradient are brought to the CPU in every step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
torch.backends.cuda.matmul.allow_tf32 = True
data = TensorDataset(torch.randn(8192, 256), torch.randint(0, 10, (8192,)))
model = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(256, 256), nn.ReLU())), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
history = []


def watched(loss, logits, y):
    history.append(loss.item())
    history.append((logits.argmax(1) == y).float().mean().item())
    for parameter in model.parameters():
        history.append(parameter.grad.norm().item())


# %% the training cell
loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True)
for epoch in range(20):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watched(loss, logits, y)
