# /// cell
# causes = ["odd_shapes"]
# because = "products with 50257 columns cannot use the fast kernels; with 50304 they can"
# gpu = true
# cohort = "2026-11-21e"
#
# [[cure]]
# old = "VOCABULARY = 50257"
# new = "VOCABULARY = 50304"
# ///
"""A head over 50257 words, a number that is no multiple of anything, in bf16."""

import torch
from torch import nn

device = "cuda"
VOCABULARY = 50257
body = nn.Sequential(nn.Linear(768, 768), nn.GELU())
model = nn.Sequential(body, nn.Linear(768, VOCABULARY, bias=False)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(8192, 768, device=device)
targets = torch.randint(0, 50257, (8192,), device=device)

# %% the training cell
for step in range(200):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), targets)
    loss.backward()
    optimizer.step()
