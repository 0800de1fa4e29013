# /// cell
# causes = ["sync_points"]
# because = "two figures of each of 16 layers are printed in each step"
# also = ["logging_or_eval", "launch_bound"]
# framework = "lightning"
# gpu = true
# batch = 256
# steps = 60
# warmup = 10
# cohort = "2026-11-21e"
#
# [[cure]]
# old = "            print("
# new = '''
#             continue
#             print('''
# ///
"""The state of each layer is printed after every batch; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(8192, 512), torch.randn(8192, 1))


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(16))
        self.out = nn.Linear(512, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for number, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            print(f"{batch_idx}/{number}: {x.mean().item():.4f} dead {(x == 0).float().mean().item():.2f}")
        return nn.functional.mse_loss(self.out(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


# %% the training cell
loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True)
trainer = pl.Trainer(
    max_epochs=10, accelerator="gpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Regression(), loader)
