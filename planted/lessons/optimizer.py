# /// cell
# lesson = "08"
# because = "AdamW goes through the weights in several passes, each a group of kernels"
# steps = 100
# small = { WIDTH = "16", BLOCKS = "2", TOKENS = "4" }
#
# [[recording]]
# name = "optimizer-foreach"
#
# [[recording]]
# name = "optimizer-fused"
# because = "AdamW in one pass over the weights"
# edits = [["foreach=True", "fused=True"]]
# ///
"""A model with many weights and little work for each: the update is a good part of the step."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 1024
BLOCKS = 24
TOKENS = 128
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, BLOCKS, enable_nested_tensor=False).to(device)
x = torch.randn(8, TOKENS, WIDTH, device=device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)

# %% the training cell
for _ in range(800):
    with torch.autocast(device, torch.bfloat16):
        loss = model(x).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
