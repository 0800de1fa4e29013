# /// cell
# causes = ["logging_or_eval"]
# because = "a callback sends 400 cores through the network after every third batch and adds a table of them to a CSV"
# framework = "lightning"
# batch = 32
# warmup = 6
# cohort = "2026-11-23"
#
# [[cure]]
# old = "ProbeToCsv(probe_x, probe_y, every_n=3)"
# new = "ProbeToCsv(probe_x, probe_y, every_n=400)"
# ///
# Dendro-dating: which valley does a wooden beam come from? Input = 200 ring widths (detrended).

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VALLEYS = ["Oetz", "Ziller", "Inn", "Lech", "Etsch", "Puster"]


def ring_widths(n, seed):
    g = torch.Generator().manual_seed(seed)
    climate = torch.randn(len(VALLEYS), 200, generator=torch.Generator().manual_seed(0))
    valley = torch.randint(0, len(VALLEYS), (n,), generator=g)
    return 0.5 * climate[valley] + torch.randn(n, 200, generator=g), valley


class RingNet(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(
            nn.Unflatten(1, (1, 200)), nn.Conv1d(1, 24, 7, padding=3), nn.ReLU(), nn.Conv1d(24, 24, 7, stride=2),
            nn.ReLU(), nn.Flatten(), nn.Linear(24 * 97, len(VALLEYS)),
        )  # fmt: skip

    def forward(self, x):
        return self.f(x)

    def training_step(self, batch, i):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=True)


class ProbeToCsv(Callback):
    """How sure is the net about each dated core, over time? The csv goes into the R script of B."""

    def __init__(self, x, y, path="probe.csv", every_n=1):
        self.x, self.y, self.path, self.every_n = x, y, path, every_n

    def on_train_start(self, trainer, module):
        pd.DataFrame(columns=["step", "core", "valley", *VALLEYS]).to_csv(self.path, index=False)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.global_step % self.every_n) != 0:
            return
        module.eval()
        with torch.no_grad():
            p = module(self.x).softmax(1)
        module.train()
        table = pd.DataFrame(p.numpy().round(4), columns=VALLEYS)
        table.insert(0, "valley", [VALLEYS[v] for v in self.y])
        table.insert(0, "core", range(len(self.y)))
        table.insert(0, "step", trainer.global_step)
        table.to_csv(self.path, mode="a", header=False, index=False)


L.seed_everything(1500, verbose=False)
train_x, train_y = ring_widths(3200, seed=1)
probe_x, probe_y = ring_widths(400, seed=2)

# %% the training cell
trainer = L.Trainer(
    max_epochs=2,
    accelerator="cpu",
    callbacks=[ProbeToCsv(probe_x, probe_y, every_n=3)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(RingNet(), DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True))
