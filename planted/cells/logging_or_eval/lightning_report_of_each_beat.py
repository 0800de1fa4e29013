# /// cell
# causes = ["logging_or_eval"]
# because = "a report, five ROC curves and five precision-recall curves of 1024 beats after each step"
# framework = "lightning"
# batch = 64
# steps = 40
# warmup = 20
# cohort = "2026-11-21c"
# looked_at = true
#
# [[cure]]
# old = "report = Report(every=1)"
# new = "report = Report(every=1000)"
# ///
"""Heartbeats are classified; a callback makes a full report of the last thousand beats after each batch; Lightning."""

from collections import deque

import lightning.pytorch as pl
import torch
from sklearn.metrics import average_precision_score, classification_report, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
KINDS = 5
kinds = torch.arange(3200) % KINDS
time = torch.linspace(0, 6.28, 160)
beats = torch.sin(time * (1 + kinds[:, None])).unsqueeze(1).repeat(1, 2, 1) + 0.8 * torch.randn(3200, 2, 160)
recordings = TensorDataset(beats, kinds)


class Beats(pl.LightningModule):
    def __init__(self, channels=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(2, channels, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.Conv1d(channels, 2 * channels, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(2 * channels, 2 * channels, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.classify = nn.Linear(2 * channels, KINDS)

    def forward(self, x):
        return self.classify(self.encoder(x).mean(-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return {
            "loss": nn.functional.cross_entropy(logits, y),
            "probabilities": logits.detach().softmax(-1),
            "labels": y,
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Report(pl.Callback):
    """Figures over a sliding window, always up to date."""

    def __init__(self, every=1, window=16):
        self.every = every
        self.probabilities, self.labels = deque(maxlen=window), deque(maxlen=window)
        self.history = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.probabilities.append(outputs["probabilities"])
        self.labels.append(outputs["labels"])
        if (trainer.global_step + 1) % self.every == 0:
            p = torch.cat(tuple(self.probabilities)).numpy()
            y = torch.cat(tuple(self.labels)).numpy()
            report = classification_report(y, p.argmax(1), output_dict=True, zero_division=0)
            for kind in range(KINDS):
                report[f"auc of {kind}"] = roc_auc_score(y == kind, p[:, kind])
                report[f"precision of {kind}"] = average_precision_score(y == kind, p[:, kind])
            self.history.append(report)


# %% the training cell
report = Report(every=1)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    callbacks=[report],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Beats(), DataLoader(recordings, batch_size=64, shuffle=True, drop_last=True))
