# /// cell
# cohort = "third"
# because = "The Trainer runs with detect_anomaly=True, left from debugging: autograd keeps a traceback for each operation and checks every gradient for NaN; leave it off."
# thread = "https://github.com/Lightning-AI/pytorch-lightning/issues/12344"
# line = "detect_anomaly=True,"
# callee = ""
# faster = 6.8
# ///
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

L.seed_everything(0, verbose=False)
t = torch.arange(1200.0)
series = torch.stack(
    [torch.sin(t / 7 * 6.283 + p) + 0.4 * torch.sin(t / 30.4 * 6.283 + q) + 0.2 * torch.randn(1200)
     for p, q in (torch.rand(40, 2) * 6.283).tolist()]
)
windows = series.unfold(1, 84, 3).reshape(-1, 84)
past, future = windows[:, :70].contiguous(), windows[:, 70:].contiguous()


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(70, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.backcast, self.forecast = nn.Linear(width, 70), nn.Linear(width, 14)

    def forward(self, x):
        h = self.body(x)
        return x - self.backcast(h), self.forecast(h)


class Visits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def training_step(self, batch, batch_idx):
        rest, target = batch
        forecast = 0
        for block in self.blocks:
            rest, part = block(rest)
            forecast = forecast + part
        loss = F.smooth_l1_loss(forecast, target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


data = TensorDataset(past, future)
loader = DataLoader(data, sampler=BatchSampler(RandomSampler(data), 64, drop_last=True), batch_size=None)
model = Visits()

# %% the training cell
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    detect_anomaly=True,
)
trainer.fit(model, loader)
print("last", trainer.callback_metrics["train_loss"].item())
