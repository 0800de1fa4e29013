# /// cell
# causes = []
# because = "matrix products take the step; attention over 32 patches takes a moment"
# framework = "lightning"
# batch = 16
# steps = 8
# warmup = 3
# tries = { workers = "2", attention = "flash" }
# cohort = "2026-11-21c"
# looked_at = true
# ///
"""A transformer over patches of a machine's vibrations finds its fault; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
vibrations, faults = torch.randn(1536, 32, 64), torch.randint(0, 8, (1536,))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.merge(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class FaultFinder(pl.LightningModule):
    def __init__(self, width=192):
        super().__init__()
        self.patch = nn.Linear(64, width)
        self.place = nn.Parameter(0.02 * torch.randn(32, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.head = nn.Linear(width, 8)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.blocks(self.patch(x) + self.place).mean(1)), y)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


# %% the training cell
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    gradient_clip_val=None,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(FaultFinder(), DataLoader(TensorDataset(vibrations, faults), batch_size=16, shuffle=True))
