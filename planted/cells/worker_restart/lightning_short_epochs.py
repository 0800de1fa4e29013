# /// cell
# causes = ["worker_restart"]
# because = "an epoch of 10 steps, and each starts two processes anew"
# framework = "lightning"
# batch = 16
# steps = 60
# warmup = 10
# profiled = 100
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = "num_workers=2)"
# new = "num_workers=2, persistent_workers=True)"
# ///
"""Few-shot fine-tuning: ten batches an epoch, and Lightning starts the workers anew for each."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

shots = TensorDataset(torch.randn(160, 256), torch.randint(0, 5, (160,)))


class Head(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 5))

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.head(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


# %% the training cell
loader = DataLoader(shots, batch_size=16, shuffle=True, num_workers=2)
trainer = pl.Trainer(
    max_epochs=100,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Head(), loader)
