# /// cell
# causes = ["unfused_optimizer"]
# because = "480 tensors, for each of which AdamW launches a dozen kernels"
# also = ["launch_bound"]
# gpu = true
# steps = 40
# cohort = "2026-11-21e"
# looked_at = true
#
# [[cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""AdamW goes through a thousand tensors one by one."""

import torch
from torch import nn

device = "cuda"
layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, 40, enable_nested_tensor=False).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
x = torch.randn(32, 256, 256, device=device)

# %% the training cell
for step in range(200):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
