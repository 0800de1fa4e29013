# /// cell
# causes = ["logging_or_eval"]
# because = "six validation batches after every fourth training batch"
# framework = "lightning"
# batch = 32
# steps = 32
# warmup = 4
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "val_check_interval=4"
# new = "val_check_interval=40"
# ///
"""A validation after every fourth batch; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def split(count):
    return TensorDataset(torch.randn(count, 1, 20, 20), torch.randint(0, 10, (count,)))


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(2400, 10),
        )  # fmt: skip

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, foreach=True)


# %% the training cell
trainer = pl.Trainer(
    max_epochs=10,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    val_check_interval=4,
    num_sanity_val_steps=0,
)
trainer.fit(Digits(), DataLoader(split(1280), batch_size=32), DataLoader(split(192), batch_size=32))
