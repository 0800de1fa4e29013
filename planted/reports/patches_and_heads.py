# /// cell
# cohort = "second"
# because = "healthy"
# ///
import torch
import torch.nn as nn
from accelerate import Accelerator

torch.manual_seed(31)


class PatchTransformer(nn.Module):
    def __init__(self, d=128, depth=3, classes=10):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.pos = nn.Parameter(torch.randn(1, 64, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, classes))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.encoder(x).mean(1))


accelerator = Accelerator(cpu=True)
labels = torch.randint(0, 10, (1200,))
images = torch.randn(1200, 3, 32, 32) * 0.5 + torch.randn(10, 3, 32, 32)[labels] * 0.3
model = PatchTransformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=60)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
# %% the training cell
model.train()
for step in range(60):
    i = torch.randint(0, 1200, (32,))
    loss = nn.functional.cross_entropy(model(images[i]), labels[i])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        accelerator.print(step, loss.item())
