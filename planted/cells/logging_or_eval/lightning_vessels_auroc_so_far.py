# /// cell
# causes = ["logging_or_eval"]
# because = "each training step sorts all pixels of the batch for an exact average precision and an AUROC"
# framework = "lightning"
# batch = 8
# steps = 24
# warmup = 4
# cohort = "2026-11-23"
# looked_at = true
#
# [[cure]]
# old = "self.log_dict(self.train_metrics(prob.flatten(), mask.flatten()))"
# new = "self.log(\"train/loss\", loss)"
# ///
"""Retinal vessels (DRIVE-like patches) with a plain FCN.

Metrics via torchmetrics as the reviewers asked for AUROC *and* AP, train and val.
"""

import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision


class VesselPatches(Dataset):
    """Random curvy lines, dark on bright."""

    def __init__(self, n: int, size: int = 64):
        g = torch.Generator().manual_seed(n)
        yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        shift = torch.rand(n, 1, 1, generator=g) * size
        wave = (xx + 6 * torch.sin(yy / (4 + 8 * torch.rand(n, 1, 1, generator=g))) - shift) % (size // 2)
        self.mask = (wave < 3).float().unsqueeze(1)
        self.image = 0.7 - 0.3 * self.mask + 0.1 * torch.randn(n, 1, size, size, generator=g)

    def __len__(self):
        return len(self.mask)

    def __getitem__(self, i):
        return self.image[i], self.mask[i]


class VesselNet(pl.LightningModule):
    def __init__(self, ch: int = 12, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=2, dilation=2), nn.ReLU(),
            nn.Conv2d(ch, 1, 1),
        )  # fmt: skip
        metrics = MetricCollection({"auroc": BinaryAUROC(), "ap": BinaryAveragePrecision()})
        self.train_metrics = metrics.clone(prefix="train/")
        self.val_metrics = metrics.clone(prefix="val/")

    def training_step(self, batch, _):
        image, mask = batch
        logits = self.net(image)
        loss = F.binary_cross_entropy_with_logits(logits, mask)
        prob, mask = logits.detach().sigmoid(), mask.int()
        self.log_dict(self.train_metrics(prob.flatten(), mask.flatten()))
        return loss

    def on_train_epoch_end(self):
        self.train_metrics.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, fused=True)


pl.seed_everything(2004, verbose=False)
patches = VesselPatches(800)

# %% the training cell
trainer = pl.Trainer(
    accelerator="cpu",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(VesselNet(), DataLoader(patches, batch_size=8, shuffle=True))
