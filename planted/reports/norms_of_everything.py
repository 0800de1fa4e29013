# /// cell
# cohort = "second"
# because = "The norms of every parameter and of its gradient are logged with self.log at each step, and log_every_n_steps=1 has them all written to TensorBoard each time; logging takes far longer than the training itself."
# thread = "https://github.com/Lightning-AI/pytorch-lightning/issues/1986"
# line = "self.log(f\"grad_norm/{name}\", p.grad.norm())"
# callee = "lightning.pytorch.LightningModule.log"
# faster = 2.78
# ///
import logging
import tempfile
import warnings

import torch
import torch.nn as nn
import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
pl.seed_everything(0)


class Sequences(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(12, 64, num_layers=3, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 6))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out, _ = self.rnn(x)
        loss = nn.functional.cross_entropy(self.head(out[:, -1]), y)
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        for name, p in self.named_parameters():
            self.log(f"grad_norm/{name}", p.grad.norm())
            self.log(f"weight_norm/{name}", p.detach().norm())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


x = torch.randn(2400, 20, 12)
y = (x.mean(1).argmax(1) % 6).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = Sequences()
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=TensorBoardLogger(tempfile.mkdtemp()), log_every_n_steps=1,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
# %% the training cell
trainer.fit(model, loader)
print("last", trainer.callback_metrics["train_loss"].item())
