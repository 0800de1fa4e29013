# /// cell
# causes = ["logging_or_eval"]
# because = "the area under the curve and its interval are found by bootstrap, for the log, in each step"
# framework = "lightning"
# batch = 96
# cohort = "2026-11-22b"
# looked_at = true
#
# [[cure]]
# old = "interval_every=1"
# new = "interval_every=1000"
# ///
"""Will there be frost in the orchard tonight? A day of twelve sensors, in Lightning, with a log."""

import tempfile

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(74, verbose=False)
SENSORS, HOURS = 12, 24
days = torch.randn(9600, SENSORS * HOURS)
frost = (days[:, -40:].mean(1) + 0.1 * torch.randn(len(days)) > 0.08).float()
logs = tempfile.mkdtemp()


def auc_interval(labels, scores, resamples=20):
    """Median and the middle 90 % of the area under the curve, by bootstrap."""
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(resamples):
        rows = rng.integers(0, len(labels), len(labels))
        areas.append(roc_auc_score(labels[rows], scores[rows]))
    return np.percentile(areas, [5, 50, 95])


class FrostWarning(L.LightningModule):
    def __init__(self, width=768, lr=1e-3, interval_every=1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(SENSORS * HOURS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def training_step(self, batch, batch_idx):
        day, label = batch
        logits = self.net(day).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        self.log("loss", loss)
        if batch_idx % self.hparams.interval_every == 0:
            low, middle, high = auc_interval(label.numpy(), logits.detach().numpy())
            self.log_dict({"auc/low": low, "auc/median": middle, "auc/high": high})
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, fused=True)


# %% the training cell
nights = DataLoader(TensorDataset(days, frost), batch_size=96, shuffle=True)
warning = FrostWarning()
trainer = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=CSVLogger(logs, name="frost"),
    log_every_n_steps=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(warning, nights)
