# /// cell
# causes = []
# because = "a step is products of matrices of 2048 rows"
# framework = "lightning"
# batch = 64
# steps = 16
# warmup = 4
# tries = { workers = "2", batch_size = "128" }
# cohort = "2026-11-22b"
# ///
"""Whether a peptide binds to a receptor, in Lightning: a transformer encoder over its residues."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(44, verbose=False)
RESIDUES, LONG = 20, 32


class Binder(L.LightningModule):
    def __init__(self, width=128, heads=4, layers=2):
        super().__init__()
        self.residue = nn.Embedding(RESIDUES, width)
        self.place = nn.Parameter(torch.randn(LONG, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="relu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.affinity = nn.Linear(width, 1)

    def forward(self, peptides):
        return self.affinity(self.encoder(self.residue(peptides) + self.place).mean(1)).squeeze(1)

    def training_step(self, batch, batch_idx):
        peptides, binds = batch
        return F.binary_cross_entropy_with_logits(self(peptides), binds)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


peptides = torch.randint(0, RESIDUES, (7680, LONG))
binds = ((peptides < 6).float().mean(1) > 0.3).float()
assay = TensorDataset(peptides, binds)

# %% the training cell
binder = Binder()
trainer = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(binder, DataLoader(assay, batch_size=64, shuffle=True))
