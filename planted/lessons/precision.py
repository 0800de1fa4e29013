# /// cell
# lesson = "07"
# because = "matrix products take the step, in 32 bits"
# steps = 45
# small = { WIDTH = "64", ROWS = "32" }
#
# [[recording]]
# name = "precision-fp32"
# causes = ["no_tf32"]
# also = ["no_mixed_precision"]
#
# [[recording]]
# name = "precision-tf32"
# because = "matrix products take the step, in TF32"
# edits = [['precision("highest")', 'precision("high")']]
# causes = ["no_mixed_precision"]
#
# [[recording]]
# name = "precision-bf16"
# because = "matrix products in bf16"
# edits = [
#     [
#         "    loss = nn.functional.mse_loss(model(x), x)\n",
#         '''
#     with torch.autocast(device, torch.bfloat16):
#         loss = nn.functional.mse_loss(model(x), x)
# ''',
#     ],
# ]
#
# [[recording]]
# name = "precision-fp16"
# because = "matrix products in fp16, with a GradScaler"
# edits = [
#     [
#         "    loss = nn.functional.mse_loss(model(x), x)\n",
#         '''
#     with torch.autocast(device, torch.float16):
#         loss = nn.functional.mse_loss(model(x), x)
# ''',
#     ],
#     ["for _ in range(800):", "scaler = torch.amp.GradScaler(device)\nfor _ in range(800):"],
#     ["    loss.backward()\n    optimizer.step()\n", '''
#     scaler.scale(loss).backward()
#     scaler.step(optimizer)
#     scaler.update()
# '''],
# ]
# ///
"""Large layers and a large batch."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 4096
ROWS = 8192
torch.set_float32_matmul_precision("highest")
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())), nn.Linear(WIDTH, WIDTH))
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
x = torch.randn(ROWS, WIDTH, device=device)

# %% the training cell
for _ in range(800):
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
