# /// cell
# lesson = "09"
# because = "figures are brought to the CPU in each step, and each waits for the GPU"
# steps = 150
# small = { WIDTH = "16", ROWS = "16" }
#
# [[recording]]
# name = "sync-item"
# causes = ["sync_points"]
# also = ["logging_or_eval", "launch_bound"]
#
# [[recording]]
# name = "sync-none"
# because = "the same figures stay on the GPU until the end"
# edits = [
#     ["loss.item()", "loss.detach()"],
#     [".float().mean().item()", ".float().mean()"],
#     [".grad.norm().item()", ".grad.norm()"],
# ]
# ///
"""Loss, accuracy and the norm of each gradient are kept in every step."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 1024
ROWS = 4096
torch.set_float32_matmul_precision("high")
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, 10))
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(ROWS, WIDTH, device=device)
y = torch.randint(0, 10, (ROWS,), device=device)

# %% the training cell
history = []
for _ in range(2000):
    with torch.autocast(device, torch.bfloat16):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    history.append(loss.item())
    history.append((logits.argmax(1) == y).float().mean().item())
    for parameter in model.parameters():
        history.append(parameter.grad.norm().item())
    optimizer.step()
