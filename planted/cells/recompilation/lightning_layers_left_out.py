# /// cell
# causes = ["recompilation"]
# because = "the tuple of the blocks that are run is nearly always a new one, for which the net is compiled anew"
# framework = "lightning"
# batch = 128
# steps = 6
# warmup = 2
# profiled = 16
# fresh = true
# cohort = "2026-11-21d"
#
# [[cure]]
# old = 'torch.compile(self.net, backend="aot_eager")'
# new = "self.net"
# ///
"""Forecasts of electricity load with LayerDrop: which blocks are run is drawn anew, for a compiled net; Lightning."""

import random

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(80)
PAST, AHEAD, DEPTH = 168, 24, 6
torch._dynamo.config.recompile_limit = 100  # 2 ** 6 and some


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.shrink(torch.tanh(self.grow(x)))


class Backbone(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.into, self.out = nn.Linear(PAST, width), nn.Linear(width, AHEAD)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))

    def forward(self, load, kept):
        x = self.into(load)
        for i in kept:
            x = self.blocks[i](x)
        return self.out(x)


class Forecaster(pl.LightningModule):
    def __init__(self, drop=0.5):
        super().__init__()
        self.drop, self.random = drop, random.Random(3)
        self.net = Backbone()
        self.compiled = [torch.compile(self.net, backend="aot_eager")]

    def layers(self):
        """The blocks of this step."""
        return tuple(i for i in range(DEPTH) if self.random.random() > self.drop)

    def training_step(self, batch, batch_idx):
        past, ahead = batch
        forward = self.compiled[0]
        return nn.functional.mse_loss(forward(past, self.layers()), ahead)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, foreach=True)


# %% the training cell
days = torch.sin(torch.arange(PAST + AHEAD) / 24 * 6.283) + 0.3 * torch.randn(2560, PAST + AHEAD)
loader = DataLoader(TensorDataset(days[:, :PAST], days[:, PAST:]), batch_size=128, shuffle=True)
trainer = pl.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)  # fmt: skip
trainer.fit(Forecaster(), loader)
