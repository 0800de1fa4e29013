# /// cell
# causes = ["unfused_attention"]
# because = "800 by 800 weights of each head go through memory again and again"
# framework = "lightning"
# batch = 2
# steps = 10
# warmup = 3
# profiled = 30
# cohort = "2026-11-21a"
# looked_at = true
#
# [[cure]]
# old = '''
#         weights = torch.einsum("bhnd,bhmd->bhnm", q, k) * q.shape[-1] ** -0.5
#         weights = torch.exp(weights - weights.amax(-1, keepdim=True))
#         weights = weights / weights.sum(-1, keepdim=True)
#         h = torch.einsum("bhnm,bhmd->bhnd", weights, v)
# '''
# new = '''
#         h = nn.functional.scaled_dot_product_attention(q, k, v)
# '''
# ///
"""Points attend to each other through einsum and a softmax of their own; Lightning."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SetAttention(nn.Module):
    def __init__(self, width=48, heads=3):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.einsum("bhnd,bhmd->bhnm", q, k) * q.shape[-1] ** -0.5
        weights = torch.exp(weights - weights.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        h = torch.einsum("bhnm,bhmd->bhnd", weights, v)
        return x + h.transpose(1, 2).flatten(2)


class PointCloud(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 48), SetAttention(), SetAttention(), nn.Linear(48, 48))
        self.head = nn.Linear(48, 10)

    def training_step(self, batch, _):
        points, label = batch
        return nn.functional.cross_entropy(self.head(self.net(points).mean(1)), label)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


# %% the training cell
clouds = TensorDataset(torch.randn(128, 800, 3), torch.randint(0, 10, (128,)))
trainer = pl.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(PointCloud(), DataLoader(clouds, batch_size=2, shuffle=True))
