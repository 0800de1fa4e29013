# /// cell
# causes = []
# because = "convolutions take the step"
# framework = "lightning"
# batch = 32
# steps = 8
# warmup = 3
# tries = { workers = "2", batch_size = "64" }
# cohort = "2026-11-21b"
# looked_at = true
# ///
"""An image classifier in Lightning whose convolutions take the step."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(8, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 96, 3, padding=1), nn.ReLU(),
            nn.Conv2d(96, 96, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96 * 64, 10),
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.to(memory_format=torch.channels_last)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)


# %% the training cell
data = TensorDataset(torch.randn(1024, 8, 16, 16), torch.randint(0, 10, (1024,)))
trainer = pl.Trainer(
    max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
