# /// cell
# causes = ["small_batch"]
# because = "four spectra per step, which reads and updates seven million weights however many spectra there are"
# framework = "lightning"
# batch = 4
# cured_batch = 32
# cohort = "2026-11-22b"
# looked_at = true
#
# [[cure]]
# old = "batch_size=4"
# new = "batch_size=32"
# ///
"""The fingerprint of a molecule from its mass spectrum, bit by bit: a wide network in Lightning."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(79, verbose=False)
BINS, BITS, MOLECULES = 2000, 1024, 1920


def measured_spectra():
    """Forty peaks each; a bit is set where some peaks stand together."""
    peaks = torch.randint(0, BINS, (MOLECULES, 40))
    spectra = torch.zeros(MOLECULES, BINS).scatter_(1, peaks, torch.rand(MOLECULES, 40))
    mixed = spectra @ (torch.rand(BINS, BITS) < 0.01).float()
    return spectra, (mixed > mixed.mean()).float()


class Fingerprinter(L.LightningModule):
    def __init__(self, width=1536):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(BINS, width), nn.LayerNorm(width), nn.GELU())
        self.deepen = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        self.bits = nn.Linear(width, BITS)

    def forward(self, spectrum):
        hidden = self.encode(spectrum)
        return self.bits(hidden + self.deepen(hidden))

    def training_step(self, batch):
        spectrum, bits = batch
        return nn.functional.binary_cross_entropy_with_logits(self(spectrum), bits)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.01, fused=True)


spectra = TensorDataset(*measured_spectra())

# %% the training cell
fingerprinter = Fingerprinter()
trainer = L.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(fingerprinter, DataLoader(spectra, batch_size=4, shuffle=True))
