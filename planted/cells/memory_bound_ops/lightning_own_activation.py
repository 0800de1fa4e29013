# /// cell
# causes = ["memory_bound_ops"]
# because = "an activation of eight operations and a norm of seven, each of which goes through memory"
# framework = "lightning"
# batch = 1024
# steps = 10
# warmup = 3
# profiled = 30
# cohort = "2026-11-21b"
# looked_at = true
#
# [[cure]]
# old = "gelu_by_hand(self.grow(self.shrink(norm_by_hand(x))))"
# new = "gelu(self.grow(self.shrink(norm(x))))"
# ///
"""Activation and norm written out term by term; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def gelu_by_hand(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def norm_by_hand(x, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + eps)


def gelu(x):
    return nn.functional.gelu(x, approximate="tanh")


def norm(x):
    return nn.functional.layer_norm(x, x.shape[-1:])


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.shrink, self.grow = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        return x + gelu_by_hand(self.grow(self.shrink(norm_by_hand(x))))


class Forecast(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 512), Layer(512), Layer(512), nn.Linear(512, 1))

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# %% the training cell
data = TensorDataset(torch.randn(40_960, 12), torch.randn(40_960, 1))
trainer = pl.Trainer(
    max_epochs=10, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Forecast(), DataLoader(data, batch_size=1024, shuffle=True))
