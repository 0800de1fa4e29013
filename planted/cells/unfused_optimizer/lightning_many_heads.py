# /// cell
# causes = ["unfused_optimizer"]
# because = "202 small tensors, for each of which Adam calls a dozen operations"
# framework = "lightning"
# batch = 64
# steps = 50
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "foreach=False"
# new = "fused=True"
# ///
"""A hundred small task heads, and Adam with its for-loop over all their tensors; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

tasks = 100
data = TensorDataset(torch.randn(4096, 48), torch.randn(4096, tasks))


class MultiTask(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(48, 128), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(128, 1) for _ in range(tasks))

    def training_step(self, batch, _):
        x, y = batch
        h = self.trunk(x)
        weight = torch.cat([head.weight for head in self.heads])
        bias = torch.cat([head.bias for head in self.heads])
        return nn.functional.mse_loss(nn.functional.linear(h, weight, bias), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, foreach=False)


# %% the training cell
trainer = pl.Trainer(
    max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(MultiTask(), DataLoader(data, batch_size=64, shuffle=True))
