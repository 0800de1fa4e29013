# /// cell
# causes = ["slow_collate"]
# because = "120 letters of each of 32 pieces are set one by one"
# framework = "lightning"
# batch = 32
# warmup = 12
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "collate_fn=one_hot)"
# new = "collate_fn=one_hot_at_once)"
# ///
"""Genome pieces become one-hot matrices letter by letter in the collate function; Lightning."""

import random

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

random.seed(0)
pieces = [("".join(random.choices("ACGT", k=120)), i % 2) for i in range(2048)]
LETTERS = {letter: i for i, letter in enumerate("ACGT")}


def one_hot(items):
    x = torch.zeros(len(items), 4, 120)
    for row, (piece, _) in enumerate(items):
        for position, letter in enumerate(piece):
            x[row, LETTERS[letter], position] = 1
    return x, torch.tensor([label for _, label in items])


def one_hot_at_once(items):
    codes = torch.tensor([[LETTERS[letter] for letter in piece] for piece, _ in items])
    return nn.functional.one_hot(codes, 4).transpose(1, 2).float(), torch.tensor([label for _, label in items])


class Promoter(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(4, 32, 9, padding=4), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(32, 32, 9), nn.ReLU(),
            nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, 2),
        )  # fmt: skip

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


# %% the training cell
loader = DataLoader(pieces, batch_size=32, shuffle=True, collate_fn=one_hot)
trainer = pl.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Promoter(), loader)
