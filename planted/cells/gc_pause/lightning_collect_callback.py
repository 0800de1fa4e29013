# /// cell
# causes = ["gc_pause"]
# because = "a callback collects garbage every fifth batch"
# framework = "lightning"
# batch = 128
# steps = 25
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "callbacks=[Collect()]"
# new = "callbacks=[]"
# ///
"""A callback against a memory leak that is long gone: it collects garbage every fifth batch; Lightning."""

import gc

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

catalogue = [{"sku": i, "price": float(i), "tags": [i, i + 1]} for i in range(2_000)]


class Collect(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx % 5 == 0:
            gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Price(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 512), nn.SiLU(), nn.Linear(512, 512), nn.SiLU(), nn.Linear(512, 1))

    def training_step(self, batch, _):
        return nn.functional.huber_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# %% the training cell
trainer = pl.Trainer(
    max_epochs=10,
    accelerator="cpu",
    logger=False,
    callbacks=[Collect()],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = TensorDataset(torch.randn(4096, 32), torch.randn(4096, 1))
trainer.fit(Price(), DataLoader(data, batch_size=128, shuffle=True))
