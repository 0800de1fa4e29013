# /// cell
# cohort = "second"
# because = "healthy"
# ///
import logging, warnings
import lightning as L
import torch
import torch.nn as nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(29)
t = torch.arange(6000.0)
series = torch.stack([torch.sin(t * 6.283 / 24) + 0.4 * torch.sin(t * 6.283 / 168 + k) + 0.1 * torch.randn(6000) for k in range(4)], 1)
windows = series.unfold(0, 108, 4).transpose(1, 2).contiguous()


class Forecaster(L.LightningModule):
    def __init__(self, d=192):
        super().__init__()
        self.rnn = nn.GRU(4, d, num_layers=2, batch_first=True)
        self.head = nn.Linear(d, 12 * 4)

    def training_step(self, batch, _):
        past, future = batch[:, :96], batch[:, 96:]
        h, _ = self.rnn(past)
        loss = nn.functional.mse_loss(self.head(h[:, -1]).view_as(future), future)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        for idx in torch.randperm(len(windows)).split(24):
            yield windows[idx]


loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
module = Forecaster()
trainer = L.Trainer(max_steps=60, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False, gradient_clip_val=1.0)
# %% the training cell
trainer.fit(module, loader)
print(trainer.callback_metrics["loss"].item())
