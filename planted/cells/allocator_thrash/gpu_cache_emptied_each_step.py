# /// cell
# causes = ["allocator_thrash"]
# because = "all cached memory is given back after each step and asked for again in the next"
# also = ["sync_points"]
# gpu = true
# steps = 40
# cohort = "2026-11-21e"
#
# [[cure]]
# old = "    torch.cuda.empty_cache()\n"
# new = ""
# ///
"""torch.cuda.empty_cache() after each step, against running out of memory."""

import torch
from torch import nn

device = "cuda"
model = nn.Sequential(
    *(m for _ in range(20) for m in (nn.Linear(2048, 2048), nn.GELU())), nn.Linear(2048, 10)
).to(device)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x, y = torch.randn(2048, 2048, device=device), torch.randint(0, 10, (2048,), device=device)

# %% the training cell
for step in range(200):
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    torch.cuda.empty_cache()
